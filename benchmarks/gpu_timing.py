"""Time of what a GPU is given, for `gpu_check.py`: CUDA graphs with caches flushed."""

import statistics
import time
from collections.abc import Callable

import torch

GPU = torch.cuda.is_available()


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of a CUDA graph's replays, the second-level cache flushed before each; one call's without a GPU."""
    if not GPU:
        begun = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begun)
    replay, flush = graph_of(run), torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    times, begun = [], time.monotonic()
    while len(times) < 7 or (len(times) < 50 and time.monotonic() - begun < 0.3):
        flush.random_(0, 2)
        times.append(event_time(replay))
    return statistics.median(times)


def graph_of(run: Callable[[], object]) -> Callable[[], None]:
    """Replays what `run` launches, after three calls that tune and compile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def event_time(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)
