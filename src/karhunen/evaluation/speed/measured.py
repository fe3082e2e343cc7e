"""How long contenders take, in turn: every one runs once per round, and a speed-up is the median ratio within a round.

A machine whose speed drifts, or that others use too, slows all contenders of a round alike. With one thread the clock
is the processor's time, which does not run while others have the processor. What a device is given is timed until the
device has done it: before a contender starts and before its clock stops, all that was queued is waited for.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from karhunen.device import HOST, wait_for

COPY_BYTES = 64 << 20
DEVICE_COPY_BYTES = 1 << 30  # more than a device's caches hold, and long beside what a launch takes


@final
@dataclass(frozen=True)
class Timings:
    """Milliseconds of each contender, round by round."""

    milliseconds: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, contenders: Mapping[str, Callable[[], object]], rounds: int, device: torch.device = HOST) -> "Timings":
        """Each runs once before the first round, to be compiled and in cache; `device` is the one they work on."""
        if rounds < 1:
            raise ValueError(f"rounds={rounds}; give 1 or more")
        alone = device.type == HOST.type and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        for run in contenders.values():
            run()
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                wait_for(device)
                start = clock()
                run()
                wait_for(device)
                found[name].append(1e3 * (clock() - start))
        return cls({name: tuple(times) for name, times in found.items()})

    def median(self, name: str) -> float:
        """Of one contender, milliseconds."""
        return statistics.median(self.milliseconds[name])

    def fastest(self, *names: str) -> str:
        """The one of smallest median."""
        return min(names, key=self.median)

    def speed_up(self, ours: str, other: str) -> float:
        """How many times faster `ours` is: the median over rounds of the ratio within a round."""
        pairs = zip(self.milliseconds[other], self.milliseconds[ours], strict=True)
        return statistics.median(a / b for a, b in pairs)


def copy_bandwidth(rounds: int = 5, device: torch.device = HOST) -> float:
    """GB/s of a plain copy in a device's memory, bytes read and bytes written both counted: what no reader of memory
    exceeds."""
    n_bytes = COPY_BYTES if device.type == HOST.type else DEVICE_COPY_BYTES
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timings = Timings.of({"copy": lambda: target.copy_(source)}, rounds, device)
    return 2 * n_bytes / timings.median("copy") / 1e6
