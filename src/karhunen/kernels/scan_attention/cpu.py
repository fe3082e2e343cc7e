"""The scan on a CPU: look-ups in registers in place of most of the arithmetic.

    block by block   query turned, taken into coefficients, rounded to 16 bits (cpu_block.py)
    group by group   scores: each column looked up for 16 to 64 tokens at once, then one product for each row
    span by span     softmax; weights in 15 bits; values: each column looked up, then one product for each row

q′ is exact to 2⁻¹⁶ of its largest coefficient, weights to 2⁻¹⁶ of the largest of a span; the sums are whole numbers.
Work is cut by (batch, KV head, rows, tokens); partials of token ranges are merged at the end.
"""

import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.byte_attention.naive import additive, gains
from karhunen.kernels.scan import isa
from karhunen.kernels.scan.emit import KINDS, Shape
from karhunen.kernels.scan_attention.cpu_angles import angles_of
from karhunen.kernels.scan_attention.cpu_layer_record import BoundLayers, held_address
from karhunen.kernels.scan_attention.cpu_record import MOST_ROWS, OF_CALL, OF_CODEC, SCRATCH, SPAN, scratch_bytes
from karhunen.kernels.scan_attention.cpu_tables import ScanFrames, ScanTables
from karhunen.kernels.scan_attention.frames import Frames, require_agreement
from karhunen.kernels.scan_attention.layers import Layers, require_layers
from karhunen.kernels.softmax import Partial, merge_partials
from karhunen.kernels.threads import run_together

TOLERANCE = 1e-3
"""Against naive in float64, relative to the largest number compared: a score's error is some 2⁻¹⁶ · √d of its largest
term, a weight carries it as a relative one, and weights below 2⁻¹⁶ of a span's largest count as nothing."""

SIZES = ("n_order", "matrix_width", "basis_width", "basis_tokens", "key_width", "value_width")

ALIGNMENT = 64
N_OF_CALL = 2 + len(OF_CALL)
"""Scale and soft cap before them."""


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
    layers: Layers | None = None,
    n_threads: int | None = None,
    width: int | None = None,
) -> Partial:
    """As `naive.scan_attention`, in float32. `n_threads`: torch's own number if None; `width`: bytes of a vector, the
    widest that fits a block if None."""
    b, h, r, _ = query.shape
    work = Work.of(b, h, r, keys.n_tokens, n_threads or torch.get_num_threads())
    mean = torch.empty(work.n_splits, b, h, r, values.tables.n_coefficients)
    log_sum = torch.empty(work.n_splits, b, h, r)
    scan(
        query, keys, values, frames, work, mean.data_ptr(), log_sum.data_ptr(), first_position=first_position,
        scale=scale, softcap=softcap, mask=mask, hidden=hidden, layers=layers, width=width,
    )  # fmt: skip
    if work.n_splits == 1:
        return Partial(mean[0], log_sum[0])
    return merge_partials([Partial(mean[i], log_sum[i]) for i in range(work.n_splits)])


@final
@dataclass(frozen=True)
class Work:
    """How a call is cut: chunks of rows, ranges of tokens, items of all, and who works on them."""

    n_chunks: int
    n_splits: int
    n_items: int
    n_workers: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, b: int, h: int, r: int, n_tokens: int, n_threads: int) -> "Work":
        """The layers of a step ask in turn for the same."""
        n_chunks = -(-r // MOST_ROWS)
        n_splits = token_splits(b * h * n_chunks, n_tokens, n_threads)
        n_items = b * h * n_chunks * n_splits
        return cls(n_chunks, n_splits, n_items, max(1, min(n_threads, n_items)))


def scan(
    query: Float[Tensor, "b h r d"],
    keys: CodedTokens,
    values: CodedTokens,
    frames: Frames,
    work: Work,
    mean: int,
    log_sum: int,
    *,
    first_position: int,
    scale: float,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    hidden: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    layers: Layers | None = None,
    width: int | None = None,
) -> None:
    """As `scan_attention`; the partials of all ranges go where `mean` [splits b h r c] and `log_sum` [splits b h r]
    point, float32. ValueError unless the shapes belong together."""
    require_agreement(query, keys, values, frames, mask)
    b, h, r, _ = query.shape
    n_tokens, block = keys.n_tokens, frames.block_tokens
    bound = Bound.of(frames, keys, values, width or fitting_width(block))
    rows = query if query.dtype == torch.float32 else query.detach().float()
    rows = rows if rows.stride(-1) == 1 else rows.detach().contiguous()
    steps = rows.stride()
    angles, terms, named = (0, 0), None, ()
    if block is not None:
        angles = angles_of(frames, first_position // block, (first_position + n_tokens) // block + 1)
    if mask is not None:
        terms = additive(mask, torch.float32).contiguous()
    if hidden is not None and len(hidden[0]):
        named = tuple(x.int().contiguous() for x in hidden)
    sides = [_side(tokens) for tokens in (keys, values)]
    Call.of(bound, r, work.n_workers).run(
        (
            _bits(scale), _bits(softcap or 0.0),
            b, h, r, work.n_chunks, work.n_splits, n_tokens, keys.tables.n_heads != h, first_position,
            rows.data_ptr(), 4 * steps[0], 4 * steps[1], 4 * steps[2],
            *angles,
            *sides[0].numbers, *sides[1].numbers,
            *((terms.data_ptr(), 4 * terms.stride(0)) if terms is not None else (0, 0)),
            *((named[0].data_ptr(), named[1].data_ptr(), len(named[0]), b == 1) if named else (0, 0, 0, 0)),
            mean, log_sum, *_layers(layers, keys, values, frames, bound, r, work.n_workers),
        ),
        work.n_items,
    )  # fmt: skip
    del rows, terms, named, sides, layers  # alive up to here: their addresses were read


def _layers(
    layers: Layers | None, keys: CodedTokens, values: CodedTokens, frames: Frames, bound: "Bound", n_rows: int,
    n_workers: int,
) -> tuple[int, ...]:  # fmt: skip
    """Their number, heat, what a codec and what a cache says of them, and the workers' memory."""
    if layers is None:
        return (0,) * 7
    parts = keys.tables, values.tables, frames
    asked = (*map(id, parts), len(keys.codes), keys.n_tokens, keys.gain is None, values.gain is None)
    known: tuple[tuple[int, ...], BoundLayers, Any, Any] | None = layers.prepared.get("call")
    if known is None or known[2] != asked:
        require_layers(layers, keys, values)
        made = BoundLayers.of(layers, frames, bound.kind)
        numbers = (
            layers.n, layers.heat.data_ptr(), layers.heat.stride(0), layers.first, made.address, held_address(layers),
        )  # fmt: skip
        known = layers.prepared["call"] = numbers, made, asked, parts
    return *known[0], known[1].memory(min(n_rows, MOST_ROWS), bound.width, n_workers)


@lru_cache(maxsize=64)
def _bits(x: float) -> int:
    return int(np.float64(x).view(np.int64))


@final
@dataclass(frozen=True)
class _Side:
    """Address and strides of one side's bytes and gains, and the gains."""

    numbers: tuple[int, ...]
    gain: Tensor | None


def _side(tokens: CodedTokens) -> _Side:
    steps = tokens.codes.stride()
    if steps[2] != 1 and tokens.n_tokens > 1:
        raise ValueError(f"codes have stride {steps[2]} along the token axis; neighbours are wanted")
    gain = gains(tokens, torch.float32)
    if gain is None:
        return _Side((tokens.codes.data_ptr(), steps[0], steps[1], 0, 0, 0), None)
    gain = gain.contiguous()
    own = (gain.data_ptr(), 4 * gain.stride(0), 4 * gain.stride(1))
    return _Side((tokens.codes.data_ptr(), steps[0], steps[1], *own), gain)


@final
@dataclass(frozen=True)
class Bound:
    """What of a problem depends on the codec alone (`OF_CODEC`), made once, and what its addresses point to."""

    numbers: tuple[int, ...]
    kind: tuple[int, int]
    width: int
    sizes: dict[str, int]
    kept: tuple[Any, ...]
    calls: threading.local

    @classmethod
    def of(cls, frames: Frames, keys: CodedTokens, values: CodedTokens, width: int) -> "Bound":
        """Made at first use for these frames and tables."""
        name = f"bound {width}"
        found = frames.prepared.get(name)
        if found is None or found[1] is not keys.tables or found[2] is not values.tables:
            found = (cls._made(frames, keys, values, width), keys.tables, values.tables)
            frames.prepared[name] = found
        return found[0]

    @classmethod
    def _made(cls, frames: Frames, keys: CodedTokens, values: CodedTokens, width: int) -> "Bound":
        key, value = ScanTables.of(keys.tables), ScanTables.of(values.tables)
        if key.kind != value.kind or key.kind not in KINDS:
            raise ValueError(f"tables of kinds {key.kind} and {value.kind}; one of {KINDS} on both sides is scanned")
        laid_out = ScanFrames.of(frames, keys.tables, width)
        there = np.maximum(value.source, 0)
        coefficient = values.tables.coefficient.long().numpy()[there] if len(there) else there
        counts = {
            "block": frames.block_tokens or 0, "has_mean": laid_out.has_mean,
            "has_common": laid_out.has_common, "n_order": len(laid_out.order),
            "n_pairs": laid_out.n_pairs, "matrix_width": laid_out.matrix.shape[-1],
            "basis_width": laid_out.basis.shape[-1],
            "basis_tokens": laid_out.basis_tokens, "key_width": key.width, "value_width": value.width,
            "n_coefficients": values.tables.n_coefficients, "matrix_head": laid_out.matrix.strides[0],
            "key_columns_head": key.column_start.strides[0], "value_columns_head": value.column_start.strides[0],
            "key_least_head": laid_out.least.strides[0],
        }  # fmt: skip
        arrays = {
            "order": laid_out.order, "matrix": laid_out.matrix, "turned_mean": laid_out.turned_mean,
            "basis": laid_out.basis, "key_plane_start": key.plane_start, "key_columns": key.column_start,
            "key_first_column": key.first_column, "key_bytes": key.bytes, "key_least": laid_out.least,
            "value_plane_start": value.plane_start, "value_columns": value.column_start,
            "value_first_column": value.first_column, "value_bytes": value.bytes,
            "value_scale": value.scale, "value_offset": value.least, "value_coefficient": coefficient,
        }  # fmt: skip
        known = counts | {name: array.ctypes.data for name, array in arrays.items()}
        sizes = {name: counts[name] for name in SIZES}
        sizes |= {"key_planes": key.most_planes, "value_planes": value.most_planes}
        numbers = tuple(int(known[name]) for name in OF_CODEC)
        return cls(numbers, key.kind, width, sizes, tuple(arrays.values()), threading.local())


@final
class Call:
    """A thread's standing call of one codec, for so many rows and workers: what the codec says of a problem is written
    once, and a step writes the rest. Python that is not run is not missed: between two layers' calls a model's weights
    pass through the caches, so every object that a call touches has to be fetched again."""

    def __init__(self, bound: "Bound", n_rows: int, n_workers: int) -> None:
        from karhunen.kernels.scan_attention.cpu_loop import compiled

        self.n_workers = n_workers
        self._problem = np.zeros(N_OF_CALL + len(bound.numbers), np.int64)
        self._problem[N_OF_CALL:] = bound.numbers
        self._scratch = _scratch(bound, min(n_rows, MOST_ROWS), n_workers)
        self._job = np.array([self._problem.ctypes.data, self._scratch[0].ctypes.data, 0, 0, 0], np.int64)
        self._job_address = self._job.ctypes.data
        counts = {min(n_rows, MOST_ROWS), n_rows % MOST_ROWS or MOST_ROWS}
        self._functions = [compiled(Shape(count, bound.width, bound.kind).token) for count in counts]

    @classmethod
    def of(cls, bound: "Bound", n_rows: int, n_workers: int) -> "Call":
        """Made at a thread's first use."""
        calls: dict[tuple[int, int], Call] = bound.calls.__dict__.setdefault("held", {})
        name = (n_rows, n_workers)
        if name not in calls:
            calls[name] = cls(bound, n_rows, n_workers)
        return calls[name]

    def run(self, numbers: tuple[int, ...], n_items: int) -> None:
        """Run the compiled loop over all items of the problem that `numbers`, `OF_CALL` in order, complete."""
        self._problem[:N_OF_CALL] = numbers
        for function in self._functions:
            self._job[2:] = n_items, 0, 0
            run_together(function, self._job_address, self.n_workers)


def _scratch(bound: "Bound", n_rows: int, n_workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Records of the memory of each worker, and that memory; kept by the calling thread for codecs of one size."""
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
    return kept[key]


@cache
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


_kept = threading.local()
