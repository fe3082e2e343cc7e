"""Frozen values as JSON and tensors: one strict way in and out for specs, recipes and fitted parts.

    from_dict(to_dict(x)) == x

A dataclass becomes `{"class": its name, field: ...}`; a tensor becomes `{"tensor": path}` and goes beside the JSON.
Kinds are found by walking the packages that hold them, so adding a file adds its kinds; no list is edited. What comes
from a file is believed where it is what the field declares: its type, its shape, finite numbers.
"""

import hashlib
import importlib
import json
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import isabstract
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from jaxtyping import AbstractArray, jaxtyped
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
    """The value whose `dismantle` is `data`; raises ValueError on an unknown kind, field or tensor, on a value that is
    not what its field declares, and on what is no such description at all."""
    try:
        return _assembled(data, kinds, tensors)
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError, RuntimeError) as error:
        raise ValueError(f"this is no description of a value ({type(error).__name__}: {error})") from error


def _assembled(data: Any, kinds: Kinds, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(data, list):
        return tuple(_assembled(item, kinds, tensors) for item in cast("list[Any]", data))
    if not isinstance(data, dict):
        return data
    body = cast("dict[str, Any]", data)
    if "tensor" in body:
        if body["tensor"] not in tensors:
            raise ValueError(f"tensor {body['tensor']!r} is named in the configuration but not stored beside it")
        return tensors[body["tensor"]]
    if "map" in body:
        pairs = [(_assembled(k, kinds, tensors), _assembled(v, kinds, tensors)) for k, v in body["map"]]
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError(f"a mapping names one of {sorted(map(str, made))} twice")
        return made
    name = body.get("class")
    if name not in kinds:
        raise ValueError(f"unknown kind {name!r}; known: {sorted(kinds)}")
    kind = kinds[cast("str", name)]
    known = {field.name for field in fields(kind) if field.init}
    given = body.keys() - {"class"}
    if unknown := sorted(given - known):
        raise ValueError(f"unknown {kind.__name__} field(s) {unknown}; known: {sorted(known)}")
    arguments = {key: _assembled(body[key], kinds, tensors) for key in sorted(given)}
    refuse_unless_declared(kind, arguments)
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {str(error).splitlines()[0]}") from error


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


def refuse_unless_a(name: str, given: object, *kinds: type, would: str) -> None:
    """TypeError, saying what would do, unless `given` is of one of the kinds."""
    if not isinstance(given, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} is a {type(given).__name__}, not a {wanted}; {would}")


def refuse_unless_declared(kind: type, given: Mapping[str, Any]) -> None:
    """ValueError, naming the field, unless every value is what the dataclass `kind` declares of its field."""
    hints = declared(kind)
    with jaxtyped("context"):  # letters are bound by what is asked in here, not in functions called from here
        for name, value in given.items():
            hint = hints[name]
            shapes = [part for part in (get_args(hint) or (hint,)) if isinstance(part, type)]
            shapes = [part for part in shapes if issubclass(part, AbstractArray)]
            fits = not shapes or not isinstance(value, Tensor) or any(isinstance(value, part) for part in shapes)
            if not fits or not conforms(value, hint):
                raise ValueError(f"{kind.__name__}: {name} is {_said(value)}, not {_named(hint)}")


@cache
def declared(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def conforms(value: Any, hint: Any) -> bool:
    """Whether `value` is of type `hint`; numbers are finite, and a bool is no number."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if hint is None or hint is NoneType:
        return value is None
    if origin in (Union, UnionType):
        return any(conforms(value, part) for part in arguments)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _conform_each(cast("tuple[Any, ...]", value), arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        held = cast("Mapping[Any, Any]", value)
        return isinstance(value, Mapping) and all(
            conforms(k, arguments[0]) and conforms(v, arguments[1]) for k, v in held.items()
        )
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, tuple | list) and all(conforms(x, arguments[0]) for x in cast("Sequence[Any]", value))
    if not isinstance(hint, type):
        return True
    if issubclass(hint, AbstractArray):
        return isinstance(value, Tensor) and isinstance(value, hint)
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (hint is float and isinstance(value, float) and math.isfinite(value))
    return isinstance(value, hint)


def _conform_each(values: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(conforms(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(conforms(v, hint) for v, hint in zip(values, hints, strict=True))


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    return repr(value)[:60] if isinstance(value, int | float | str | bool | NoneType) else f"a {type(value).__name__}"


def _named(hint: Any) -> str:
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return str(hint).replace("typing.", "").replace("karhunen.", "")


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
