"""Compiled functions on several threads: those that torch's own operations run on, where they can be had.

torch keeps its workers spinning for a while after each operation, so threads of one's own would fight them for the
cores. Its OpenMP library takes any function: `GOMP_parallel` hands one to the same workers. Elsewhere a few threads of
Python's serve.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

Job = Any
"""A compiled `void(int64)`, as ctypes sees it."""


def run_together(job: Job, address: int, n_workers: int) -> None:
    """Call job(address) `n_workers` times at once, perhaps fewer: workers claim what there is to do."""
    if n_workers <= 1:
        job(address)
        return
    parallel = _openmp()
    if parallel is not None:
        parallel(ctypes.cast(job, ctypes.c_void_p), address, n_workers, 0)
        return
    others = [_pool(n_workers).submit(job, address) for _ in range(1, n_workers)]
    job(address)
    for other in others:
        other.result()


@cache
def _openmp() -> Any:
    """`GOMP_parallel` of the OpenMP library that this process has loaded with torch; None where there is none."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return None
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line and ".so" in line}
    for path in sorted(loaded):
        if any(name in Path(path).name for name in ("libgomp", "libiomp", "libomp")):
            try:
                function = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):
                continue
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            function.restype = None
            return function
    return None


@cache
def _pool(n_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_workers - 1, thread_name_prefix="karhunen")
