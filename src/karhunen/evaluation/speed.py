"""How long contenders take, in turn: every one runs once per round, and a speed-up is the median ratio within a round.

A machine whose speed drifts, or that others use too, slows all contenders of a round alike. With one thread the clock
is the processor's time, which does not run while others have the processor.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from karhunen.device import HOST

COPY_BYTES = 64 << 20


@final
@dataclass(frozen=True)
class Timings:
    """Milliseconds of each contender, round by round."""

    milliseconds: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, contenders: Mapping[str, Callable[[], object]], rounds: int) -> "Timings":
        """Each runs once before the first round, to be compiled and in cache."""
        if rounds < 1:
            raise ValueError(f"rounds={rounds}; give 1 or more")
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        for run in contenders.values():
            run()
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                start = clock()
                run()
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


def copy_bandwidth(rounds: int = 5) -> float:
    """GB/s of a plain copy in memory, bytes read and bytes written both counted: what no reader of memory exceeds."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=HOST)
    target = torch.empty_like(source)
    timings = Timings.of({"copy": lambda: target.copy_(source)}, rounds)
    return 2 * COPY_BYTES / timings.median("copy") / 1e6
