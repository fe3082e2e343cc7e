"""Coding gives way: it rests after each piece of work while the engine computes steps and little waits to be coded."""

import time
from collections.abc import Callable
from typing import final

BUSY_SECONDS = 1.0
"""The engine counts as busy for so long after a step."""


@final
class Pace:
    """Coding takes `share` of a thread's time, 0 < share ≤ 1, beside an engine at work; all of it beside an idle one.

    A thread beside a decoding step slows it, though cores are free: both are Python and share memory and caches.
    `step` is the engine's to call, `rest` the coding thread's.
    """

    def __init__(self, share: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self.share = share
        self._sleep = sleep
        self._last_step = -BUSY_SECONDS

    def step(self) -> None:
        """A step has been computed."""
        self._last_step = time.monotonic()

    def rest(self, worked_seconds: float, is_behind: bool) -> None:
        """After so much work; not at all while the engine is idle or more waits than should (`is_behind`)."""
        if not is_behind and time.monotonic() - self._last_step < BUSY_SECONDS:
            self._sleep(worked_seconds * (1 / self.share - 1))
