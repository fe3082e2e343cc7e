"""Frozen values as JSON and tensors: one strict way in and out for specs, recipes and fitted parts.

    from_dict(to_dict(x)) == x

A dataclass becomes `{"class": its name, field: ...}`; a tensor becomes `{"tensor": path}` and goes beside the JSON.
Kinds are found by walking the packages that hold them, so adding a file adds its kinds; no list is edited.
"""

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import isabstract
from typing import Any, cast

import torch
from torch import Tensor

Kinds = Mapping[str, type]


@cache
def kinds_in(*packages: str) -> Kinds:
    """Concrete dataclasses defined anywhere in `packages` (dotted names), by class name."""
    found: dict[str, type] = {}
    for package in packages:
        for module in _modules(package):
            for value in vars(module).values():
                if not isinstance(value, type) or not is_dataclass(value) or isabstract(value):
                    continue
                if value.__module__ != module.__name__:
                    continue
                if found.get(value.__name__, value) is not value:
                    raise TypeError(f"two kinds are named {value.__name__}: {found[value.__name__]} and {value}")
                found[value.__name__] = value
    return found


def _modules(package: str) -> list[Any]:
    root = importlib.import_module(package)
    if not hasattr(root, "__path__"):
        return [root]
    names = sorted(info.name for info in pkgutil.iter_modules(root.__path__))
    return [root, *(importlib.import_module(f"{package}.{name}") for name in names)]


def dismantle(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """JSON of `value`; tensors met on the way are put into `tensors` under their dotted path."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value.contiguous()
        return {"tensor": path}
    if isinstance(value, tuple | list):
        items: list[Any] = list(cast("Any", value))
        return [dismantle(item, tensors, _join(path, str(i))) for i, item in enumerate(items)]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        pairs = enumerate(mapping.items())
        return {"map": [[dismantle(k, tensors), dismantle(v, tensors, _join(path, str(i)))] for i, (k, v) in pairs]}
    if is_dataclass(value) and not isinstance(value, type):
        body = {f.name: dismantle(getattr(value, f.name), tensors, _join(path, f.name)) for f in fields(value)}
        return {"class": type(value).__name__, **body}
    raise TypeError(f"cannot store a {type(value).__name__} at {path or 'the root'}")


def assemble(data: Any, kinds: Kinds, tensors: Mapping[str, Tensor]) -> Any:
    """The value whose `dismantle` is `data`; raises ValueError on an unknown kind, field or tensor."""
    if isinstance(data, list):
        return tuple(assemble(item, kinds, tensors) for item in cast("list[Any]", data))
    if not isinstance(data, dict):
        return data
    body = cast("dict[str, Any]", data)
    if "tensor" in body:
        if body["tensor"] not in tensors:
            raise ValueError(f"tensor {body['tensor']!r} is named in the configuration but not stored beside it")
        return tensors[body["tensor"]]
    if "map" in body:
        return {assemble(k, kinds, tensors): assemble(v, kinds, tensors) for k, v in body["map"]}
    name = body.get("class")
    if name not in kinds:
        raise ValueError(f"unknown kind {name!r}; known: {sorted(kinds)}")
    kind = kinds[cast("str", name)]
    known = {field.name for field in fields(kind) if field.init}
    given = body.keys() - {"class"}
    if unknown := sorted(given - known):
        raise ValueError(f"unknown {kind.__name__} field(s) {unknown}; known: {sorted(known)}")
    arguments = {key: assemble(body[key], kinds, tensors) for key in sorted(given)}
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def to_dict(value: Any) -> dict[str, Any]:
    """JSON of a spec, which holds no tensor; raises TypeError if it does."""
    tensors: dict[str, Tensor] = {}
    data = dismantle(value, tensors)
    if tensors:
        raise TypeError(f"{type(value).__name__} holds tensors {sorted(tensors)}; it is fitted, not a spec")
    return data


def fingerprint(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of a value's canonical JSON and tensors."""
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256(json.dumps(_plain_numbers(dismantle(value, tensors)), sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(str(tensors[name].dtype).encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def refuse_unless_one_of(name: str, given: object, known: tuple[str, ...]) -> None:
    """ValueError unless `given` is one of the words a field knows."""
    if given not in known:
        raise ValueError(f"unknown {name} {given!r}; known: {', '.join(known)}")


def refuse_unless_whole(**given: object) -> None:
    """ValueError unless every value counts something: a whole number, not a ratio."""
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is not a whole number; give an integer")


def _plain_numbers(data: Any) -> Any:
    """2.0 as 2: equal values have equal fingerprints."""
    if isinstance(data, float) and data.is_integer():
        return int(data)
    if isinstance(data, list):
        return [_plain_numbers(item) for item in cast("list[Any]", data)]
    if isinstance(data, dict):
        return {key: _plain_numbers(item) for key, item in cast("dict[str, Any]", data).items()}
    return data


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
