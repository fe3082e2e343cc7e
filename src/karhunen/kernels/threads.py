"""A few workers side by side, the caller among them: `run_together(n, function)` calls function(0) … function(n − 1)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def run_together(n_workers: int, function: Callable[[int], None]) -> None:
    """Returns when all are done; an exception of any is raised."""
    others = [_pool(n_workers).submit(function, worker) for worker in range(1, n_workers)]
    function(0)
    for other in others:
        other.result()


@cache
def _pool(n_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_workers - 1, thread_name_prefix="karhunen")
