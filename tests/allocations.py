"""How many bytes a piece of work holds at its peak, from the allocator's own record."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that were allocated and not yet freed since `work` began; what lay there before is not counted.

    PyTorch's CPU allocator reports each block; memory of other libraries is not seen.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    inner: Any = seen.profiler
    held = peak = 0
    for event in sorted(inner.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
