"""The state of transformers' own cache layers as plain values: sliding windows, recurrent and convolutional states.

    layer ─▶ {attribute: tensor, number, text, or mappings and lists of these} ─▶ a new layer of the same class

What a layer keeps is what its class says, whatever the class; an attribute that is none of these is refused by name, so
that nothing is restored in part.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

NOT_KEPT = ("device",)  # follows the model


def layer_state(layer: Any, apart: tuple[str, ...] = ()) -> dict[str, Any]:
    """Attributes by name, but for those kept `apart`; ValueError on one that cannot be written down."""
    return {
        name: _plain(value, f"{type(layer).__name__}.{name}")
        for name, value in vars(layer).items()
        if name not in NOT_KEPT and name not in apart
    }


def restore_layer(layer: Any, state: Mapping[str, Any], device: torch.device, apart: tuple[str, ...] = ()) -> None:
    """The mirror of `layer_state`, onto a new layer of the same class; ValueError if the state is another class's."""
    kind = type(layer)
    for name in state:
        if not name.isidentifier() or name.startswith("__") or callable(getattr(kind, name, None)) or name in apart:
            raise ValueError(f"a {kind.__name__} keeps no {name!r}")
    if missing := sorted(vars(layer).keys() - state.keys() - {*NOT_KEPT, *apart}):
        raise ValueError(f"the state of a {kind.__name__} without {', '.join(missing)}")
    for name, value in state.items():
        setattr(layer, name, _made(value, device))
    if getattr(layer, "is_initialized", True) or "dtype" in state:
        layer.device = device


def is_kept(value: Any) -> bool:
    """Whether a layer's state holds any number yet."""
    if isinstance(value, Tensor):
        return value.numel() > 0
    if isinstance(value, Mapping):
        return any(is_kept(item) for item in cast("Mapping[Any, Any]", value).values())
    return isinstance(value, tuple) and any(is_kept(item) for item in cast("tuple[Any, ...]", value))


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return {key: _plain(item, f"{path}[{key!r}]") for key, item in mapping.items()}
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return tuple(_plain(item, f"{path}[{i}]") for i, item in enumerate(items))
    raise ValueError(f"{path} is a {type(value).__name__}, which cannot be stored; this cache cannot be resumed")


def _made(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        if list(mapping) == ["dtype"] and isinstance(mapping["dtype"], str):
            found = getattr(torch, mapping["dtype"], None)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"{mapping['dtype']!r} is not a dtype")
            return found
        return {key: _made(item, device) for key, item in mapping.items()}
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        return [_made(item, device) for item in items]
    return value
