"""Where tensors lie: the host's memory, and frozen values that move from one device to another as a whole.

Control flow is decided on the host. What lies on another device is asked for at a few named places, never in a step of
decoding: each question waits until the device has done all that was queued before it.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

HOST = torch.device("cpu")

T = TypeVar("T")


def on_host(x: Tensor) -> bool:
    """Whether the numbers of `x` can be read without waiting for a device."""
    return x.device.type == HOST.type


def present() -> dict[str, int]:
    """How many devices of each kind PyTorch sees here, the host first."""
    found = {HOST.type: 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None and other.type not in found:
        found[other.type] = torch.accelerator.device_count()
    return {kind: n for kind, n in found.items() if n}


def named(device: torch.device) -> str:
    """As PyTorch calls it, with the maker's name where that is told: `cuda:0 NVIDIA H200`."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def wait_for(device: torch.device) -> None:
    """Return when `device` has done all that was queued; the host queues nothing."""
    if device.type != HOST.type:
        torch.accelerator.synchronize(device)


@cache
def computes_float64(device: torch.device) -> bool:
    """Whether a device has float64, in which vectors are coded; Apple's MPS and some integrated GPUs have not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """`x`, made on the host, on `device`. The host does not wait for CUDA, which has taken the numbers over when the
    call returns; of other devices that is not known."""
    return x.to(device, non_blocking=device.type == "cuda")


def answers(*questions: Tensor) -> tuple[Tensor, ...]:
    """The numbers of small tensors of one device, on the host; waits for that device, once for all of them. What comes
    from another device comes in float64."""
    if all(map(on_host, questions)):
        return questions
    if not computes_float64(questions[0].device):
        return tuple(x.to(HOST).double() for x in questions)
    flat = torch.cat([x.flatten().double() for x in questions]).to(HOST)
    parts = flat.split([x.numel() for x in questions])
    return tuple(part.view(x.shape) for part, x in zip(parts, questions, strict=True))


def device_of(value: Any) -> torch.device | None:
    """Where the first tensor of a frozen value lies; None if it holds none."""
    if isinstance(value, Tensor):
        return value.device
    return next((found for part in _parts(value) if (found := device_of(part)) is not None), None)


def moved(value: T, device: torch.device) -> T:
    """`value` with every tensor on `device`: dataclasses, mappings and sequences of them. What lies there already is
    returned as it is; a part named twice is moved once. Fields are taken over as they are, since they were checked when
    the value was made; what a value has cached is made anew."""
    return cast("T", _moved(value, device, {}))


def _moved(value: Any, device: torch.device, seen: dict[int, tuple[Any, Any]]) -> Any:
    if id(value) in seen:
        return seen[id(value)][1]
    made = value
    if isinstance(value, Tensor):
        made = value.to(device)
    elif is_dataclass(value) and not isinstance(value, type):
        made = _rebuilt(value, device, seen)
    elif isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        parts = {key: _moved(item, device, seen) for key, item in items.items()}
        made = parts if any(parts[key] is not items[key] for key in items) else value
    elif isinstance(value, tuple | list):
        items = cast("tuple[Any, ...] | list[Any]", value)
        parts = [_moved(item, device, seen) for item in items]
        made = type(items)(parts) if any(a is not b for a, b in zip(parts, items, strict=True)) else value
    seen[id(value)] = value, made
    return made


def _rebuilt(value: Any, device: torch.device, seen: dict[int, tuple[Any, Any]]) -> Any:
    parts = {field.name: _moved(getattr(value, field.name), device, seen) for field in fields(value)}
    if all(part is getattr(value, name) for name, part in parts.items()):
        return value
    made = object.__new__(type(value))
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def _parts(value: Any) -> list[Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).values())
    return list(cast("Any", value)) if isinstance(value, tuple | list) else []
