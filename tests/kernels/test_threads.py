"""Every item of a job is done once, by torch's own workers or by Python's threads."""

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import cfunc, types

from karhunen.kernels import threads
from karhunen.kernels.scan.emit import claim, float_at, set_float

N_ITEMS = 1000


@cfunc(types.void(types.int64))
def visit(job):
    """`job`: the counter of items, how many there are, the counter of workers, then a float for each item."""
    claim(job + 16)
    while True:
        item = claim(job)
        if item >= N_ITEMS:
            return
        set_float(job + 24 + 4 * item, np.float32(float_at(job + 24 + 4 * item) + 1))


def visits(n_workers: int) -> tuple[list[float], int]:
    """How often each item was done, and by how many workers."""
    memory = np.zeros(24 + 4 * N_ITEMS, np.uint8)
    threads.run_together(visit.ctypes, memory.ctypes.data, n_workers)
    counters = memory[:24].view(np.int64)
    return memory[24:].view(np.float32).tolist(), int(counters[2])


@pytest.mark.parametrize("n_workers", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("openmp", [True, False])
def test_every_item_is_done_once(n_workers: int, openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("torch has no OpenMP library here")
    done, workers = visits(n_workers)
    assert done == [1.0] * N_ITEMS
    assert 1 <= workers <= max(1, n_workers)
    assert openmp or workers == max(1, n_workers), "without OpenMP all threads come"


def test_where_no_library_is_named_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.Path, "is_file", lambda path: False)
    assert threads._openmp.__wrapped__() is None
