"""How long, how many, how fast: memory and bandwidth of devices against a model's weights and cache.

    weights + tables + batch · held(context)  ≤  devices · (memory − reserve)
    seconds of a decode step  ≥  (weights read + batch · held(context)) / (devices · bandwidth)

Weights and cache are taken to be spread evenly over the devices. The bandwidth floor counts bytes alone: no arithmetic,
no communication, no decoding of codes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from karhunen.planning.rate import Rate
from karhunen.planning.shape import BITS, ModelShape

MOST = 1 << 40  # tokens or sequences: beyond it nothing limits them


@final
@dataclass(frozen=True)
class Machine:
    """`n_devices` alike; bytes of memory and bytes per second of each, None where they are not said. `reserve_bytes` of
    each are left free for activations and gaps."""

    memory_bytes: int | None = None
    n_devices: int = 1
    reserve_bytes: int = 0
    bandwidth: int | None = None

    def __post_init__(self) -> None:
        if self.n_devices < 1:
            raise ValueError(f"{self.n_devices} devices hold nothing; give 1 or more")
        if self.memory_bytes is not None and not 0 <= self.reserve_bytes < self.memory_bytes:
            raise ValueError(
                f"a reserve of {self.reserve_bytes:,} bytes leaves nothing of the {self.memory_bytes:,} of a device"
            )

    @property
    def usable_bytes(self) -> int | None:
        """Of all devices, the reserve left out."""
        return None if self.memory_bytes is None else self.n_devices * (self.memory_bytes - self.reserve_bytes)


@final
@dataclass(frozen=True)
class Work:
    """What is run: `batch` sequences of `context` tokens; dtypes of the uncompressed cache and of weights. Weights are
    as published if `weights` is None, or of so many bytes if that is a number."""

    context: int = 32768
    batch: int = 1
    cache_dtype: str = "bfloat16"
    weights: str | int | None = None

    def __post_init__(self) -> None:
        if self.context < 1 or self.batch < 1:
            raise ValueError(f"{self.batch} sequences of {self.context} tokens; give 1 or more of each")
        for said in (self.cache_dtype, self.weights):
            if isinstance(said, str) and said not in BITS:
                raise ValueError(f"unknown dtype {said!r}; known: {', '.join(BITS)}")

    @property
    def cache_bits(self) -> float:
        """Of a number of the uncompressed cache."""
        return BITS[self.cache_dtype]


@final
@dataclass(frozen=True)
class Capacity:
    """Of one rate. `max_context` is for the work's batch, `max_batch` for its context: None where memory is not said
    or nothing limits them (`unlimited`). Seconds are floors, None without a bandwidth."""

    held_bytes: float
    ratio: float
    max_context: int | None
    max_batch: int | None
    unlimited: bool
    step_seconds: float | None
    best_tokens_per_second: float | None


def capacity(shape: ModelShape, rate: Rate, machine: Machine, work: Work) -> Capacity:
    """What fits, and how fast it can be at best; ValueError where the weights' size is not known but needed."""
    held = work.batch * rate.held_bytes(shape, work.context, work.cache_bits)
    found: list[int | None] = [None, None]
    if machine.usable_bytes is not None:
        room = machine.usable_bytes - weight_bytes(shape, work) - rate.table_bytes(shape)
        one = rate.held_bytes(shape, work.context, work.cache_bits)
        found = [
            largest(lambda n: work.batch * rate.held_bytes(shape, n, work.cache_bits) <= room),
            largest(lambda n: n * one <= room),
        ]
    max_context, max_batch = (None if n is None or n >= MOST else n for n in found)
    step = best = None
    if machine.bandwidth is not None:
        step = step_seconds(shape, rate, machine, work, work.batch)
        if max_batch:
            best = max_batch / step_seconds(shape, rate, machine, work, max_batch)
    return Capacity(
        held_bytes=held,
        ratio=rate.ratio(shape, work.context, work.cache_bits),
        max_context=max_context,
        max_batch=max_batch,
        unlimited=any(n is not None and n >= MOST for n in found),
        step_seconds=step,
        best_tokens_per_second=best,
    )


def weight_bytes(shape: ModelShape, work: Work) -> float:
    """Held by all devices together; ValueError where nobody says how many there are."""
    if isinstance(work.weights, int):
        return work.weights
    if shape.weights is None:
        raise ValueError(
            f"how many weights {shape.name} has is not known; give their size (--weights 16GB), or install "
            "'karhunen[hf]', which counts them"
        )
    return shape.weights.held_bytes(None if work.weights is None else BITS[work.weights])


def weights_read(shape: ModelShape, work: Work, batch: int) -> float:
    """Bytes of weights that one decode step of `batch` sequences reads."""
    held = weight_bytes(shape, work)
    if shape.weights is None:
        return held
    bits = BITS[work.weights] if isinstance(work.weights, str) else None
    scale = held / shape.weights.held_bytes(bits)  # 1 unless a size was given
    return scale * shape.weights.read_bytes(batch, bits)


def step_seconds(shape: ModelShape, rate: Rate, machine: Machine, work: Work, batch: int) -> float:
    """The least that one decode step of `batch` sequences of the work's context can take."""
    assert machine.bandwidth is not None, "asked for with a bandwidth only"
    cache = batch * rate.held_bytes(shape, work.context, work.cache_bits)
    return (weights_read(shape, work, batch) + cache) / (machine.n_devices * machine.bandwidth)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest n ≥ 0 that fits while n + 1 does not; MOST if MOST fits."""
    if fits(MOST):
        return MOST
    low, high = 0, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
