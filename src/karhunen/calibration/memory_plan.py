"""Whether a calibration fits, how many sequences it reads at a time, and what it says about that beforehand."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from karhunen.byte_sizes import said_bytes
from karhunen.calibration.memory import HOST, DeviceMemory, Work, memory_of
from karhunen.hf.sizes import ModelSizes

TOKENS_AT_A_TIME = 8192  # of an accelerator: it is busy with these; a processor is with any one sequence
LEAST_SEQUENCE = 256
USABLE = 0.95  # of an accelerator's free memory: blocks of many sizes leave gaps between them

Free = Mapping[str, int | None]
"""Bytes free on each device; None where it does not tell, and nothing is refused."""


@final
@dataclass(frozen=True)
class MemoryPlan:
    """What is held where, what is free there, and the work that was chosen so that it fits."""

    devices: tuple[DeviceMemory, ...]
    free: Free
    work: Work
    loaded: bool

    def line(self) -> str:
        """One line for people."""
        shown = [d for d in self.devices if d.peak]
        carrying = [d for d in shown if d.device != HOST]
        if len(carrying) > 2:  # of many alike the fullest says it
            shown = [max(carrying, key=lambda d: d.peak), *(d for d in shown if d.device == HOST)]
        parts = [_said(d, self.free.get(d.device), self.loaded) for d in shown]
        if len(carrying) > 2:
            parts[0] = f"{len(carrying)} devices, the fullest {parts[0]}"
        n, t = self.work.batch, self.work.sequence_tokens
        at_a_time = f"{n} sequence{'s' if n > 1 else ''} of up to {t:,} tokens at a time"
        return f"memory: {'; '.join(parts)}; {at_a_time}"


def plan_memory(sizes: ModelSizes, work: Work, free: Free, batch: int | None = None, loaded: bool = True) -> MemoryPlan:
    """The work with a batch that fits: `batch` if given, else the most that bring something.

    `free` is what is left beside the weights if they are `loaded`, else what is there for them too. ValueError where
    it does not fit, saying what would.
    """
    wanted = _most(sizes, work) if batch is None else batch
    while True:
        tried = replace(work, batch=wanted)
        devices = memory_of(sizes, tried)
        short = [d for d in devices if not _fits(d, free, loaded)]
        if not short:
            return MemoryPlan(devices, free, tried, loaded)
        if batch is not None or wanted == 1:
            raise ValueError(_refusal(sizes, tried, short[0], free, loaded))
        wanted //= 2


def _most(sizes: ModelSizes, work: Work) -> int:
    """The most sequences at a time that bring something, a power of two."""
    if any(layer.device == HOST for layer in sizes.layers):
        return 1
    n_sequences = -(-work.n_tokens // work.sequence_tokens)
    most = max(1, min(TOKENS_AT_A_TIME // work.sequence_tokens, n_sequences))
    return 1 << (most.bit_length() - 1)


def usable_bytes(device: str, free: int) -> int:
    """What of the free bytes can be relied on."""
    return free if device == HOST else int(USABLE * free)


def _fits(device: DeviceMemory, free: Free, loaded: bool) -> bool:
    room = free.get(device.device)
    needed = device.working if loaded else device.peak
    return room is None or needed <= usable_bytes(device.device, room)


def _said(device: DeviceMemory, free: int | None, loaded: bool) -> str:
    said = [f"{said_bytes(device.weights)} of weights"] if device.weights else []
    work = device.working - device.statistics
    said += [f"{said_bytes(work)} to work in"] if work else []
    said += [f"{said_bytes(device.statistics)} of statistics"] if device.statistics else []
    beside = " beside the weights" if loaded and device.weights else ""
    room = "" if free is None else f" ({said_bytes(free)} free{beside})"
    return f"{device.device} {' + '.join(said)}{room}"


def _refusal(sizes: ModelSizes, work: Work, device: DeviceMemory, free: Free, loaded: bool) -> str:
    room = free.get(device.device) or 0
    many = "one sequence" if work.batch == 1 else f"{work.batch} sequences at a time"
    given = f"calibration does not fit: {many} of {work.sequence_tokens:,} tokens: {_said(device, room, loaded)}"
    if not loaded and device.weights > room:
        return f"{given}; spread the weights over devices (--device auto, device_map='auto') or use --dtype bfloat16"
    if device.statistics > room:
        return f"{given}; use fewer tokens (--max-tokens), which make fewer samples, or a recipe of fewer statistics"
    if work.batch > 1:
        return f"{given}; use fewer sequences at a time (--batch 1)"
    length = work.sequence_tokens // 2
    while length >= LEAST_SEQUENCE:
        shorter = memory_of(sizes, replace(work, sequence_tokens=length))
        if all(_fits(d, free, loaded) for d in shorter):
            return f"{given}; sequences of {length:,} tokens would (--sequence-tokens {length})"
        length //= 2
    return (
        f"{given}; spread the model over devices (--device auto, device_map='auto'), use --dtype bfloat16, or shorter "
        "sequences (--sequence-tokens)"
    )
