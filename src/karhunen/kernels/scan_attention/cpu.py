"""The scan on a CPU: look-ups in registers in place of most of the arithmetic.

    block by block   query turned, taken into coefficients, folded with 16 + 16 entries of each plane (cpu_block.py)
    group by group   scores: two look-ups of two digits for each plane and row, 16 to 64 tokens at once
    span by span     softmax; weights in 15 bits; values: two look-ups for each column, one product for each row

Scores are exact to m / 8191 · ½ in each of a token's look-ups, m the largest folded entry; weights to 2⁻¹⁶ of the
largest of a span. Work is cut by (batch, KV head, rows, tokens); partials of token ranges are merged at the end.
"""

import threading
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens, Partial, merge_partials
from karhunen.kernels.byte_attention.naive import additive, gains
from karhunen.kernels.scan import isa
from karhunen.kernels.scan.emit import ROWS, WIDTHS
from karhunen.kernels.scan.tokens import MOST_PLANES
from karhunen.kernels.scan_attention.cpu_record import MOST_ROWS, PROBLEM, SCRATCH, SPAN, scratch_bytes
from karhunen.kernels.scan_attention.cpu_tables import ScanFrames, ScanTables
from karhunen.kernels.scan_attention.frames import Frames
from karhunen.kernels.threads import run_together

TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}
"""Against naive in float64, for scores and means of order 1 to 10: a score is a sum of some 60 entries, each rounded to
1/16382 of the largest, which gives errors of a few 1e-4 of that; a weight carries the score's as a relative one."""

ALIGNMENT = 64


def available() -> tuple[bool, str]:
    """Whether this processor has what the vector code uses, and what that is."""
    widths = isa.widths()
    return (True, isa.description()) if widths else (False, "no vector code is written for this processor")


def scan_attention(
    query: Float[Tensor, "b h r d"],
    keys: CodedTokens,
    values: CodedTokens,
    frames: Frames,
    *,
    first_position: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    hidden: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    n_threads: int | None = None,
    width: int | None = None,
) -> Partial:
    """As `naive.scan_attention`, in float32. `n_threads`: torch's own number if None; `width`: bytes of a vector, the
    widest that fits a block if None."""
    b, h, r, _ = query.shape
    n_tokens, block = keys.n_tokens, frames.block_tokens
    bound = Bound.of(frames, keys, values, width or fitting_width(block))
    n_threads = n_threads or torch.get_num_threads()
    n_chunks = -(-r // MOST_ROWS)
    n_splits = token_splits(b * h * n_chunks, n_tokens, n_threads)
    problem = bound.problem.copy()
    p = problem[0]
    kept = _tokens_into(p, keys, values)  # what addresses point to lives until the call is over
    rows = query.detach().float()
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    p["batch"], p["heads"], p["rows"], p["row_chunks"], p["splits"] = b, h, r, n_chunks, n_splits
    p["tokens"], p["joined"] = n_tokens, keys.tables.n_heads != h
    p["first_position"], p["scale"], p["softcap"] = first_position, scale, softcap or 0.0
    p["query"] = rows.data_ptr()
    p["query_batch"], p["query_head"], p["query_row"] = 4 * rows.stride(0), 4 * rows.stride(1), 4 * rows.stride(2)
    if block is not None:
        angles = angles_of(frames, (first_position + n_tokens) // block + 1)
        kept.append(angles)
        p["angles"], p["angles_row"] = angles.ctypes.data, angles.strides[0]
    if mask is not None:
        terms = additive(mask, torch.float32).contiguous()
        kept.append(terms)
        p["mask"], p["mask_batch"] = terms.data_ptr(), 4 * terms.stride(0)
    if hidden is not None and len(hidden[0]):
        named = [x.long().contiguous() for x in hidden]
        kept += named
        p["hidden_rows"], p["hidden_tokens"] = named[0].data_ptr(), named[1].data_ptr()
        p["n_hidden"], p["hidden_sorted"] = len(named[0]), b == 1
    mean = torch.empty(n_splits, b, h, r, values.tables.n_coefficients)
    log_sum = torch.empty(n_splits, b, h, r)
    p["mean"], p["log_sum"] = mean.data_ptr(), log_sum.data_ptr()
    read(problem, bound, r, min(n_threads, b * h * n_chunks * n_splits))
    if n_splits == 1:
        return Partial(mean[0], log_sum[0])
    return merge_partials([Partial(mean[i], log_sum[i]) for i in range(n_splits)])


def read(problem: np.ndarray, bound: "Bound", n_rows: int, n_workers: int) -> None:
    """Run the compiled loop over all items of a problem."""
    from karhunen.kernels.scan_attention.cpu_loop import attend

    n_workers = max(1, n_workers)
    vector = WIDTHS[bound.width]
    scratch = scratch_of(bound, min(n_rows, MOST_ROWS), n_workers)
    for count in {min(n_rows, MOST_ROWS), n_rows % MOST_ROWS or MOST_ROWS}:
        rows = ROWS[count]
        if n_workers == 1:
            attend(rows, vector, problem, scratch, 0, 1)
        else:
            run_together(
                n_workers, lambda i, rows=rows: attend(rows, vector, problem, scratch, i, n_workers)
            )  # fmt: skip


@final
@dataclass(frozen=True)
class Bound:
    """What of a problem depends on the codec alone, made once, and what its addresses point to."""

    problem: np.ndarray
    width: int
    sizes: dict[str, int]
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, frames: Frames, keys: CodedTokens, values: CodedTokens, width: int) -> "Bound":
        """ValueError where a head has more bytes than can be scanned at once."""
        name = f"bound {width}"
        found = frames.prepared.get(name)
        if found is None or found[1] is not keys.tables or found[2] is not values.tables:
            found = (cls._made(frames, keys, values, width), keys.tables, values.tables)
            frames.prepared[name] = found
        return found[0]

    @classmethod
    def _made(cls, frames: Frames, keys: CodedTokens, values: CodedTokens, width: int) -> "Bound":
        key, value = ScanTables.of(keys.tables), ScanTables.of(values.tables)
        most = max(key.most_planes, value.most_planes)
        if most > MOST_PLANES:
            raise ValueError(f"{most} bytes of a head; at most {MOST_PLANES} are scanned")
        laid_out = ScanFrames.of(frames, keys.tables, width)
        coefficient = values.tables.coefficient.long().contiguous().numpy()
        problem = np.zeros(1, PROBLEM)
        p = problem[0]
        p["block"], p["has_mean"] = frames.block_tokens or 0, laid_out.has_mean
        p["n_order"], p["n_pairs"] = len(laid_out.order), laid_out.n_pairs
        p["matrix_width"], p["key_width"] = laid_out.matrix.shape[-1], key.width
        p["basis_width"], p["value_width"] = laid_out.basis.shape[-1], value.width
        p["matrix_head"] = laid_out.matrix.strides[0]
        p["n_coefficients"] = values.tables.n_coefficients
        arrays = {
            "order": laid_out.order, "matrix": laid_out.matrix, "turned_mean": laid_out.turned_mean,
            "basis": laid_out.basis, "key_plane_start": key.plane_start, "key_columns": key.column_start,
            "key_first_column": key.first_column, "key_rows": key.rows, "value_plane_start": value.plane_start,
            "value_columns": value.column_start, "value_first_column": value.first_column, "value_bytes": value.bytes,
            "value_scale": value.scale, "value_offset": value.offset, "value_coefficient": coefficient,
        }  # fmt: skip
        for name, array in arrays.items():
            p[name] = array.ctypes.data
        p["key_columns_head"], p["value_columns_head"] = key.column_start.strides[0], value.column_start.strides[0]
        sizes = {name: int(p[name]) for name in ("n_order", "matrix_width", "basis_width", "value_width")}
        sizes |= {"key_planes": key.most_planes, "value_planes": value.most_planes}
        return cls(problem, width, sizes, tuple(arrays.values()))


def _tokens_into(p: Any, keys: CodedTokens, values: CodedTokens) -> list[Any]:
    kept: list[Any] = []
    for name, tokens in (("key", keys), ("value", values)):
        codes = tokens.codes
        if codes.shape[-1] > 1 and codes.stride(-1) != 1:
            raise ValueError(f"codes have stride {codes.stride(-1)} along the token axis; neighbours are wanted")
        p[f"{name}_codes"], p[f"{name}_batch"], p[f"{name}_plane"] = codes.data_ptr(), codes.stride(0), codes.stride(1)
        level = gains(tokens, torch.float32)
        if level is not None:
            level = level.contiguous()
            kept.append(level)
            p[f"{name}_gain"] = level.data_ptr()
            p[f"{name}_gain_batch"], p[f"{name}_gain_head"] = 4 * level.stride(0), 4 * level.stride(1)
    return kept


def scratch_of(bound: Bound, n_rows: int, n_workers: int) -> np.ndarray:
    """Memory of each worker, kept by the calling thread."""
    key = (n_rows, bound.width, n_workers, *bound.sizes.values())
    kept: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = _kept.__dict__.setdefault("scratch", {})
    if key not in kept:
        wanted = scratch_bytes(n_rows, bound.width, bound.sizes)
        by_place = {name: -(-n // ALIGNMENT) * ALIGNMENT + ALIGNMENT for name, n in wanted.items()}
        memory = np.empty(n_workers * sum(by_place.values()) + ALIGNMENT, np.uint8)
        made = np.zeros(n_workers, SCRATCH)
        at = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        for worker in range(n_workers):
            for name, n in by_place.items():
                made[worker][name] = at
                at += n
        kept[key] = (made, memory)
    return kept[key][0]


def fitting_width(block_tokens: int | None) -> int:
    """The widest vector whose groups fill a block."""
    widths = isa.widths()
    return next((w for w in widths if block_tokens is None or block_tokens % w == 0), widths[-1])


def token_splits(n_items: int, n_tokens: int, n_threads: int) -> int:
    """Token ranges per (batch, head, rows): the fewest that keep threads evenly busy, none shorter than two spans."""
    most = max(1, n_tokens // (2 * SPAN))
    if n_threads == 1 or most == 1:
        return 1

    def idle(splits: int) -> float:
        return -(-n_items * splits // n_threads) * n_threads / (n_items * splits)

    candidates = range(1, min(most, 4 * n_threads) + 1)
    return next((splits for splits in candidates if idle(splits) <= 1.1), candidates[-1])


def angles_of(frames: Frames, n_blocks: int) -> np.ndarray:
    """Cosines and sines of the first positions of blocks, [block][cosines | sines], padded; as many as asked, or more."""
    key = (frames.frequencies, frames.block_tokens)
    found = _angles.get(key)
    if found is None or len(found) < n_blocks:
        n = max(n_blocks, 2 * len(found) if found is not None else 64)
        n_pairs = -(-len(frames.frequencies) // 8) * 8
        angle = np.arange(n)[:, None] * float(frames.block_tokens or 0) * np.array(frames.frequencies)
        found = np.zeros((n, 2 * n_pairs), np.float32)
        found[:, : angle.shape[1]] = np.cos(angle)
        found[:, n_pairs : n_pairs + angle.shape[1]] = np.sin(angle)
        _angles[key] = found
    return found


_kept = threading.local()
_angles: dict[tuple[tuple[float, ...], int | None], np.ndarray] = {}
