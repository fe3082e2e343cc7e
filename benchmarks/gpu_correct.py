"""Whether each GPU kernel is its definition: coding to the last bit, attention within the kernels' tolerance.

Bytes and gains lie in buffers that are poisoned beyond them; definitions run on the host in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_shapes import SIZES, D, H, Q, frames_of, side_of, tables_of
from torch import Tensor

from karhunen.kernels.byte_attention import CodedTokens
from karhunen.kernels.byte_attention import naive as naive_attention
from karhunen.kernels.byte_decode import naive as naive_decode
from karhunen.kernels.byte_encode import naive as naive_encode
from karhunen.kernels.scan_attention import naive as naive_scan
from karhunen.kernels.softmax import Partial

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """One call's shape; `first` is the position of the first token."""

    kind: str = "free"
    b: int = 1
    h: int = H
    q: int = Q
    d: int = D
    sizes: tuple[int, ...] = SIZES
    t: int = 1000
    first: int = 41
    block: int | None = 64
    joined: bool = False
    mean: bool = True
    gain: bool = True
    masked: bool = False
    softcap: float | None = None
    folded: bool = False

    def tables(self) -> Any:
        return tables_of(self.kind, 1 if self.joined else self.h, self.d, self.sizes)


def checks(small: bool) -> Iterator[tuple[Any, ...]]:
    """Name, function and arguments of each case."""
    base = Case(h=1, q=2, d=16, sizes=(3, 5, 8), t=70) if small else Case(h=2)
    for kind in ("additive", "free", "overlapping"):
        yield f"attention, {kind}", check_scan, replace(base, kind=kind)
        yield f"coding, {kind}", check_coding, replace(base, kind=kind)
    yield "attention, additive, folded", check_scan, replace(base, kind="additive", folded=True)
    yield "attention, float16", check_floats, replace(base, kind="float16")
    yield "coding, float16", check_coding, replace(base, kind="float16")
    more = {
        "one token": {"t": 1, "first": 7},
        "no frame turns": {"block": None, "first": 0},
        "words not aligned": {"first": 3},
        "joined heads, no mean": {"joined": True, "h": 2, "mean": False},
        "no gains": {"gain": False},
        "mask, hidden tokens, cap": {"b": 2, "masked": True, "softcap": 3.0},
        "seven rows": {"q": 7},
    }
    if not small:
        more |= {
            "many ranges": {"t": 40000},
            "head of 64": {"d": 64, "sizes": SIZES[:16]},
            "blocks of 16": {"block": 16},
        }
    for name, changes in more.items():
        yield f"attention, {name}", check_scan, replace(base, **changes)


def check_coding(case: Case) -> dict:
    """Bytes and decoded numbers are equal."""
    from karhunen.kernels.byte_decode import gpu as gpu_decode
    from karhunen.kernels.byte_encode import gpu as gpu_encode

    tables = case.tables()
    x = torch.randn(2, tables.n_heads, case.t, case.d)
    codes = torch.randint(0, 256, (2, tables.n_planes, case.t), dtype=torch.uint8)
    pairs = (
        (gpu_encode.byte_encode(x.to(DEVICE), tables, tile=32), naive_encode.byte_encode(x, tables)),
        (gpu_decode.byte_decode(codes.to(DEVICE), tables, tile=32), naive_decode.byte_decode(codes, tables)),
    )
    different = [int((found.cpu() != known).sum()) for found, known in pairs]
    return {"right": not any(different), "bytes_that_differ": different[0], "numbers_that_differ": different[1]}


def check_scan(case: Case) -> dict:
    """Attention with frames of the query."""
    from karhunen.kernels.scan_attention import gpu as gpu_scan
    from karhunen.kernels.split_attention.launch import Launch

    keys, values = (side_of(case.tables(), case.t, case.b, DEVICE, case.gain) for _ in range(2))
    query, frames = torch.randn(case.b, case.h, case.q, case.d), frames_of(case.h, case.d, case.block, case.mean)
    given: dict[str, Any] = {"first_position": case.first, "scale": case.d**-0.5, "softcap": case.softcap}
    if case.masked:
        given["mask"] = torch.rand(case.b, case.t) > 0.3
        given["hidden"] = (torch.zeros(2, dtype=torch.int64), torch.tensor([0, case.t - 1]))
    known = naive_scan.scan_attention(query.double(), at_home(keys), at_home(values), frames, **given)
    given = {name: moved(value) for name, value in given.items()}
    found = gpu_scan.scan_attention(
        query.to(DEVICE), keys, values, frames, launch=Launch(64, 4), folded=case.folded, **given
    )
    return compared(found, known, gpu_scan.TOLERANCE)


def check_floats(case: Case) -> dict:
    """Attention from tables of float16, frames given."""
    from karhunen.kernels.byte_attention import gpu as gpu_attention
    from karhunen.kernels.split_attention.launch import Launch

    keys, values = (side_of(case.tables(), case.t, case.b, DEVICE) for _ in range(2))
    n = (case.t - 1 + case.first) // 64 + 1
    frames, bias = torch.randn(case.b, case.h, case.q, n, case.d), torch.randn(case.b, case.h, case.q, n)
    given: dict[str, Any] = {"block_tokens": 64, "first_offset": case.first, "scale": case.d**-0.5}
    known = naive_attention.byte_attention(
        frames.double(), at_home(keys), at_home(values), key_bias=bias.double(), **given
    )
    found = gpu_attention.byte_attention(
        frames.to(DEVICE), keys, values, key_bias=bias.to(DEVICE), launch=Launch(64, 4), **given
    )
    return compared(found, known, gpu_attention.TOLERANCE)


def compared(found: Partial, known: Partial, tolerance: float) -> dict:
    """Errors, as shares of the largest number, and whether both are within the tolerance."""
    row: dict[str, Any] = {}
    for name in ("mean", "log_sum"):
        ours, theirs = getattr(found, name).cpu().double(), getattr(known, name)
        seen = theirs.isfinite()
        equal = torch.equal(seen, ours.isfinite())
        error = (ours - theirs)[seen].abs().max() / theirs[seen].abs().max() if equal else torch.tensor(torch.inf)
        row[name] = float(error)
    return {"right": max(row.values()) <= tolerance, **row}


def moved(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def at_home(side: CodedTokens) -> CodedTokens:
    """The same where the definition runs."""
    gain, levels = (None if x is None else x.cpu() for x in (side.gain, side.gain_levels))
    return CodedTokens(side.codes.cpu(), side.tables, gain, levels)
