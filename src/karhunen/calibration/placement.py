"""Where a model that is not loaded yet goes, so that calibration fits beside its weights."""

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from karhunen.calibration.memory import HOST, PER_LAYER, DeviceMemory, Work, memory_of
from karhunen.calibration.memory_plan import Free, MemoryPlan, plan_memory, usable_bytes
from karhunen.device import present
from karhunen.hf.sizes import sizes_of
from karhunen.hf.skeleton import spread

WEIGHTS_SHARE = 0.8  # of what is free on a device, where a model only runs: caches and forwards take the rest


@final
@dataclass(frozen=True)
class Placement:
    """A device map as transformers takes it (None: the host's memory), and the memory that calibration takes there."""

    device_map: dict[str, Any] | None
    plan: MemoryPlan


def devices_of(text: str, local_rank: int = 0) -> tuple[str, ...]:
    """Devices by name: one, several with commas, `auto` for all accelerators here. A kind without a number, such as
    `cuda`, is the process's own device of that kind.

    ValueError for a name that PyTorch does not know, and for `auto` where there is no accelerator.
    """
    here = present()
    if text == "auto":
        found = tuple(_numbered(kind, i, n) for kind, n in here.items() if kind != HOST for i in range(n))
        if not found:
            raise ValueError("there is no accelerator here to spread the model over; use --device cpu, or name devices")
        return found
    try:
        named: list[Any] = [torch.device(name.strip()) for name in text.split(",")]
    except RuntimeError as error:
        raise ValueError(f"{text!r} names no device; use cpu, cuda, cuda:1, mps, xpu, cuda:0,cuda:1 or auto") from error
    kinds: list[str] = [d.type for d in named]
    own = {kind: _numbered(kind, local_rank, here.get(kind, 0)) for kind in kinds} | {HOST: HOST}
    return tuple(own[d.type] if d.index is None or d.type == HOST else str(d) for d in named)


def _numbered(kind: str, i: int, n: int) -> str:
    """As PyTorch and accelerate call device `i` of `n` of a kind: by its kind alone where there is one, as of `mps`."""
    return f"{kind}:{i}" if n > 1 or kind == "cuda" else kind


def accelerators(n: int, kind: str = "cuda") -> tuple[str, ...]:
    """Names of `n` accelerators of a kind (`cuda`, `xpu`, `mps`) that need not be here: a plan may be for another
    machine."""
    return tuple(_numbered(kind, i, n) for i in range(n))


def check_present(devices: tuple[str, ...]) -> None:
    """ValueError for devices that this machine does not have, with those that it has."""
    here = present()
    for name in devices:
        device = torch.device(name)
        if (device.index or 0) >= here.get(device.type, 0):
            seen = [kind if kind == HOST else f"{kind}:{i}" for kind, n in here.items() for i in range(n)]
            raise ValueError(f"there is no {name} here: PyTorch sees {', '.join(seen)}")


def chosen(text: str) -> tuple[str, ...]:
    """`devices_of`, all of them here; ValueError otherwise."""
    devices = devices_of(text)
    check_present(devices)
    return devices


def place_to_run(model: nn.Module | None, devices: tuple[str, ...], free: Free) -> dict[str, Any] | None:
    """A device map as transformers takes it (None: the host's memory) for a model that only runs: whole layers on each
    of several devices, in their order, each filled to WEIGHTS_SHARE of what is free there. Of one device nothing is
    asked, the model neither. ValueError where the model does not fit."""
    if model is None or len(devices) == 1:
        return None if devices == (HOST,) else {"": devices[0]}
    room = {_accelerates(d): int(WEIGHTS_SHARE * usable_bytes(d, free.get(d) or 0)) for d in devices}
    return spread(model, room)


def place(model: nn.Module, devices: tuple[str, ...], work: Work, free: Free, batch: int | None) -> Placement:
    """The model's weights on `devices`, whole layers each, with room left on each to work in.

    `model` may be a skeleton; `free` is for weights and calibration. An empty `work.layers` means those whose cache
    grows. ValueError where it does not fit, saying what would.
    """
    whole = {"": devices[0]}
    sizes = sizes_of(model, whole)
    length = min(work.sequence_tokens, sizes.positions)
    work = replace(work, layers=work.layers or sizes.full_layers, sequence_tokens=length)
    if len(devices) > 1:
        to_work_in = max(_to_work_in(d, len(devices)) for d in memory_of(sizes, work))
        room = {_accelerates(d): max(0, usable_bytes(d, free.get(d) or 0) - to_work_in) for d in devices}
        whole = spread(model, room)
        sizes = sizes_of(model, whole)
    return Placement(None if devices == (HOST,) else whole, plan_memory(sizes, work, free, batch, loaded=False))


def _to_work_in(whole: DeviceMemory, n_devices: int) -> int:
    """What one of several devices needs beside weights, if it has up to half as many layers again as the others."""
    share = min(1.0, 1.5 / n_devices)
    phases = ({k: share * n if k in PER_LAYER else n for k, n in p.items()} for p in (whole.forward, whole.gradients))
    return int(max(sum(phase.values()) for phase in phases))


def _accelerates(device: str) -> int | str:
    """A device as accelerate names it."""
    found: Any = torch.device(device)
    return found.type if found.index is None else found.index if found.type == "cuda" else device
