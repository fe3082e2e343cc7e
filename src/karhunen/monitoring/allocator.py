"""Freed memory is kept by the process, not handed back page by page: a model's work takes and frees the same sizes.

glibc maps large blocks anew each time, and touching new pages can cost more than the arithmetic on them (on a virtual
machine a copy of 20 MB was seen to run at 3 GB/s instead of 19).
"""

import ctypes
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # malloc.h
KEPT_BYTES = 2**31 - 1
PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Whether the allocator took the advice; others than glibc are left as they are."""
    if sys.platform != "linux":
        return False
    advise = getattr(ctypes.CDLL(None), "mallopt", None)
    if advise is None:
        return False
    advice = ((MMAP_THRESHOLD, KEPT_BYTES), (TRIM_THRESHOLD, KEPT_BYTES), (TOP_PAD, PAD_BYTES))
    taken = [advise(name, value) == 1 for name, value in advice]
    return all(taken)
