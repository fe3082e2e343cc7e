"""Sizes of memory as people write and read them: GB are 10^9 bytes, GiB 2^30."""

import re
from math import isfinite

STEPS = ("", "K", "M", "G", "T")
WRITTEN = re.compile(r"([0-9.]+(?:E[+-]?[0-9]+)?)\s*([KMGT]?)(I?)B?")
DECIMAL, BINARY = 1000, 1024
LEAST_BARE = 10**6
"""The least number that is taken for bytes where no unit is written: whoever writes 24 means 24 GB."""


def bytes_of(text: str) -> int:
    """Bytes of a size as people write it: 24GB, 80GiB, 500M, 8000000000.

    ValueError for anything else, and for nothing.
    """
    return _number(text, text, "size of memory; write it as 24GB, 24GiB, 512MB or a number of bytes")


def bytes_per_second_of(text: str) -> int:
    """Bytes per second of a bandwidth as people write it: 3.35TB/s, 900GB/s.

    ValueError for anything else, and for nothing.
    """
    size = text.strip().removesuffix("/s")
    return _number(text, size, "bandwidth; write it as 3.35TB/s, 900GB/s or a number of bytes per second")


def said_bytes(n_bytes: float) -> str:
    """Bytes for people, in powers of ten."""
    if n_bytes < 10**6:
        return f"{n_bytes / 10**3:.0f} kB"
    return f"{n_bytes / 10**6:.0f} MB" if n_bytes < 10**9 else f"{n_bytes / 10**9:.1f} GB"


def _number(given: str, size: str, wanted: str) -> int:
    found = WRITTEN.fullmatch(size.strip().upper())
    try:
        step, binary = (STEPS.index(found[2]), bool(found[3])) if found else (0, False)
        number = float(found[1]) * (BINARY if binary else DECIMAL) ** step if found else 0.0
    except ValueError:
        number = 0.0
    least = 1 if found and found[2] else LEAST_BARE
    if number < least or not isfinite(number) or (found and found[3] and not found[2]):
        raise ValueError(f"{given!r} is no {wanted}")
    return int(number)
