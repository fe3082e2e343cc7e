"""Attention to everything a layer holds, read from its bytes: no dense copy of the coded tokens exists at any time.

    coded tokens   a chunk at a time: frames of the query ─▶ kernel on bytes ─▶ mean of value coefficients, log-sum
    all chunks     merged by log-sum-exp ─▶ inverse value transform, once
    exact tokens   sinks, recent and excepted ones: two products with a softmax between; merged with the coded ones

Working memory is that of one chunk and does not grow with the cache. `reference.attend` is the definition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from karhunen.attention.frame_queries import LaidOut
from karhunen.attention.reader import ByteSide, Reader, bytes_of
from karhunen.attention.refined import layers_of, refined_attention
from karhunen.codec import Packed, SideCodec
from karhunen.device import answers, on_host
from karhunen.kernels.byte_attention import CodedTokens, byte_attention
from karhunen.kernels.byte_attention.naive import additive
from karhunen.kernels.exact_attention import CodedPart, exact_attention
from karhunen.kernels.paths import fastest
from karhunen.kernels.scan_attention import Frames, scan_attention
from karhunen.kernels.softmax import Partial, attended, capped, merge_partials, with_sinks
from karhunen.kernels.step_attention import step_attention
from karhunen.quantizers.base import Codes
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.statistics.need import SLOTS, Slot
from karhunen.store.exceptions import RowExceptions
from karhunen.store.snapshot import Snapshot

CHUNK_TOKENS = 8192
"""Coded tokens read at a time: bounds the working memory."""

WITH_LAYERS = ("naive", "cpu")
"""Paths of the scan that read refinements; elsewhere the tokens that have them are read apart (refined.py)."""

TOLERANCE = 1e-3
"""Of the largest output, against decoding and softmax in float64: the scan rounds q′ to 2⁻¹⁶ of its largest coefficient
and weights to 2⁻¹⁶ of a span's largest; a weight carries a score's error as a relative one."""


class NotReadableError(ValueError):
    """These tokens have to be decoded instead, for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"these tokens cannot be read from their bytes: {reason}")
        self.reason = reason


def attend(
    reader: Reader,
    held: Snapshot,
    query: Float[Tensor, "b q m d"],
    *,
    scale: float,
    softcap: float | None = None,
    mask: Shaped[Tensor, "b 1 m t"] | None = None,
    sinks: Float[Tensor, " q"] | None = None,
    over_coded: "OverCoded | None" = None,
    on_log_sum: Callable[[Float[Tensor, "b q m"]], None] | None = None,
) -> Float[Tensor, "b q m e"]:
    """The newest `m` tokens, held exact, attend to all tokens held up to each of them.

    `mask` is additive, or true where a token is seen; it says all that is visible if given, and `over_coded` what is
    known of it already. `sinks` are learned logits that take a share of the softmax and give nothing. Kernels are those
    of the query's device. `on_log_sum` is told what weights are divided by: log Σ exp of all scores, sinks too.
    NotReadableError where `refusal` gives a reason.
    """
    over_coded = OverCoded.of(held, mask) if over_coded is None else over_coded
    if reason := refusal(reader, held, over_coded):
        raise NotReadableError(reason)
    b, n_heads, m, _ = query.shape
    h = held.recent["key"].shape[1]
    rows = query.reshape(b, h, n_heads // h * m, -1)
    rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    extra = held.exceptions.by_row(held.batch) if held.exceptions is not None else None
    if m == 1 and mask is None and softcap is None and (extra is None or extra.there is None):
        whole = _step(reader, held, extra, rows, scale)
    else:
        coded = None if held.packed is None else _coded(reader, held, rows, scale, softcap, over_coded.terms)
        exact = _exact(held, extra, rows, m, scale, softcap, mask)
        whole = exact if coded is None else merge_partials([exact, _in_vectors(coded)])
    if held.refined is not None and held.packed is not None and _path("scan_attention", rows) not in WITH_LAYERS:
        terms = over_coded.terms
        whole = merge_partials([whole, refined_attention(reader, held, rows, scale, softcap, terms)])
    heads = Partial(whole.mean.reshape(b, n_heads, m, -1), whole.log_sum.reshape(b, n_heads, m))
    whole = with_sinks(heads, None if sinks is None else sinks[:, None])
    if on_log_sum is not None:
        on_log_sum(whole.log_sum)
    return whole.mean.to(query.dtype)


def refusal(reader: Reader, held: Snapshot, over_coded: "OverCoded") -> str:
    """Why these tokens have to be decoded instead; empty if they can be read as they are."""
    if reader.mode == "decoded":
        return reader.reason
    granule = reader.codec.granule_tokens
    if granule > 1 and any(start % granule for start, _, _ in held.offsets(0, held.n_coded)):
        return "positions change within a block of tokens that were coded together"
    return over_coded.reason


@final
@dataclass(frozen=True)
class OverCoded:
    """What a mask says of the coded tokens: `terms`, None where all are seen, or why bytes cannot be read under it.

    Of one new token on a device the terms are handed on as they are: whether they hide anything is not asked, since the
    answer would have to be waited for. With several new tokens it is, so a caller with many layers asks once.
    """

    terms: Shaped[Tensor, "b t"] | None = None
    reason: str = ""

    @classmethod
    def of(cls, held: Snapshot, mask: Tensor | None) -> "OverCoded":
        """Of a mask [b, heads, m, t] over all tokens held."""
        if mask is None or not held.n_coded:
            return cls()
        if mask.shape[1] != 1:
            return cls(reason="the mask differs between heads")
        coded = mask[:, 0, :, held.n_sink : held.n_sink + held.n_coded]
        terms = coded[:, 0]
        if mask.shape[2] == 1 and not on_host(mask):
            return cls(terms)
        seen = terms if terms.dtype == torch.bool else terms == 0
        if mask.shape[2] == 1:
            return cls(None if bool(seen.all()) else terms)
        alike, all_seen = answers((coded == coded[:, :1]).all(), seen.all())
        if not bool(alike):
            return cls(reason="the mask differs between queries over coded tokens")
        return cls(None if bool(all_seen) else terms.clone())


def _step(reader: Reader, held: Snapshot, extra: RowExceptions | None, rows: Tensor, scale: float) -> Partial:
    """One token of each row, which sees all that is held."""
    pieces = [(held.sink["key"], held.sink["value"]), (held.recent["key"], held.recent["value"])]
    pieces += [(extra.key, extra.value)] if extra else []
    maps, packed = reader.to_vectors, held.packed
    path = _path("step_attention", rows)
    if packed is not None and reader.scan is not None and maps is not None and path != "naive":
        runs = held.offsets(0, held.n_coded)
        if len(runs) == 1 and len(set(first := runs[0][2])) == 1:
            key, value = (_coded_tokens(packed[slot], _quantizer(reader, slot)) for slot in SLOTS)
            return step_attention(
                rows, key, value, reader.scan, pieces, maps.matrix, maps.offset, path=path, first_position=first[0],
                scale=scale, hidden=held.apart(slice(None), 0, held.n_coded), layers=layers_of(reader, held),
            )  # fmt: skip
    coded = None if packed is None else _coded(reader, held, rows, scale, None, None)
    return exact_attention(rows, pieces, coded, scale=scale, path=_path("exact_attention", rows))


def _exact(
    held: Snapshot,
    extra: RowExceptions | None,
    rows: Tensor,
    m: int,
    scale: float,
    softcap: float | None,
    mask: Tensor | None,
) -> Partial:
    """Sinks, recent tokens (the new ones among them) and excepted ones."""
    key, value = (
        torch.cat([held.sink[s], held.recent[s], *([getattr(extra, s)] if extra else [])], dim=2).to(rows.dtype)
        for s in ("key", "value")
    )
    scores = capped(rows @ key.mT * scale, softcap)  # [b h r n]
    n_held = held.n_sink + held.recent["key"].shape[2]
    if mask is not None:
        visible = torch.cat([mask[..., : held.n_sink], mask[..., held.n_sink + held.n_coded :]], dim=-1)
        terms = additive(visible.flatten(0, 2), rows.dtype).view_as(visible)
        if extra:
            index = (held.n_sink + extra.tokens.long())[:, None, None].expand(-1, 1, mask.shape[2], -1)
            at = mask.gather(-1, index)
            terms = torch.cat([terms, additive(at.flatten(0, 2), rows.dtype).view_as(at)], dim=-1)
        scores = _per_query(scores, terms, m)
    elif m > 1:
        later = torch.ones(m, n_held, dtype=torch.bool, device=rows.device).triu(n_held - m + 1)
        terms = rows.new_zeros(1, 1, m, key.shape[2])
        terms[..., :n_held].masked_fill_(later, -torch.inf)
        scores = _per_query(scores, terms, m)
    if extra is not None and extra.there is not None:
        scores[..., n_held:].masked_fill_(~extra.there[:, None, None], -torch.inf)
    return attended(scores, value)


def _per_query(scores: Tensor, terms: Tensor, m: int) -> Tensor:
    return (scores.unflatten(2, (-1, m)) + terms[:, :, None]).flatten(2, 3)


def _path(op: str, rows: Tensor) -> str:
    """Compiled kernels compute in float32; other precisions are the definition's."""
    return fastest(op, rows.device.type)[0] if rows.dtype == torch.float32 else "naive"


def _coded(
    reader: Reader, held: Snapshot, rows: Tensor, scale: float, softcap: float | None, mask: Tensor | None
) -> CodedPart:
    """All coded tokens."""
    assert held.packed is not None and reader.frames is not None and reader.to_vectors is not None, "something is coded"
    if reader.scan is not None:
        return _scanned(reader, reader.scan, held, rows, scale, softcap, mask)
    laid_out = reader.frames.lay_out(rows)
    parts: list[Partial] = []
    for start, stop, first in _chunks(held, reader.codec.granule_tokens):
        visible = _visible(held, mask, start, stop)
        settings = {"scale": scale, "softcap": softcap}
        if len(set(first)) == 1:
            parts.append(_read(reader, held.packed, slice(None), start, stop, first[0], laid_out, visible, settings))
            continue
        by_row = [
            _read(
                reader, held.packed, slice(r, r + 1), start, stop, first[r], laid_out[r : r + 1],
                None if visible is None else visible[r : r + 1], settings,
            )
            for r in range(held.batch)
        ]  # fmt: skip
        parts.append(Partial(torch.cat([p.mean for p in by_row]), torch.cat([p.log_sum for p in by_row])))
    whole = parts[0] if len(parts) == 1 else merge_partials(parts)
    h, r = rows.shape[1:3]
    maps = reader.to_vectors
    mean, log_sum = whole.mean.reshape(held.batch, h, r, -1), whole.log_sum.reshape(held.batch, h, r)
    return CodedPart(Partial(mean.to(rows.dtype), log_sum.to(rows.dtype)), maps.matrix, maps.offset)


def _scanned(
    reader: Reader,
    frames: Frames,
    held: Snapshot,
    rows: Tensor,
    scale: float,
    softcap: float | None,
    mask: Tensor | None,
) -> CodedPart:
    """All coded tokens, one call for each run of positions: one, unless rows were padded or turns left gaps. The
    definition, which decodes what it is given, is given a chunk at a time."""
    assert held.packed is not None and reader.to_vectors is not None, "something is coded"
    path = _path("scan_attention", rows)
    quantizers = [_quantizer(reader, slot) for slot in SLOTS]
    layers = layers_of(reader, held) if path in WITH_LAYERS else None
    parts: list[Partial] = []
    whole_runs = path != "naive"
    runs = held.offsets(0, held.n_coded) if whole_runs else _chunks(held, reader.codec.granule_tokens)
    for start, stop, first in runs:
        whole = len(set(first)) == 1
        by_row: list[Partial] = []
        for r in [slice(None)] if whole else [slice(i, i + 1) for i in range(held.batch)]:
            sides = [_rows_of(held.packed[slot], r, start, stop, reader.codec.side(slot)) for slot in ("key", "value")]
            key, value = (_coded_tokens(p, q) for p, q in zip(sides, quantizers, strict=True))
            hidden = held.apart(r, start, stop, refined=path not in WITH_LAYERS)
            by_row.append(
                scan_attention(
                    rows[r], key, value, frames, path=path, first_position=first[r.start or 0], scale=scale,
                    softcap=softcap, mask=None if mask is None else mask[r, start:stop], hidden=hidden,
                    layers=None if layers is None else layers.of(r, start),
                )
            )  # fmt: skip
        parts.append(by_row[0] if whole else Partial(*(torch.cat(x) for x in zip(*map(_both, by_row), strict=True))))
    return CodedPart(
        parts[0] if len(parts) == 1 else merge_partials(parts), reader.to_vectors.matrix, reader.to_vectors.offset
    )


def _quantizer(reader: Reader, slot: Slot) -> ByteQuantizer:
    return cast("ByteQuantizer", bytes_of(reader.codec.side(slot)))


def _coded_tokens(packed: Packed, quantizer: ByteQuantizer) -> CodedTokens:
    return CodedTokens(packed.planes, quantizer.byte_tables, packed.side.get("gain"), quantizer.gain_levels)


def _both(part: Partial) -> tuple[Tensor, Tensor]:
    return part.mean, part.log_sum


def _in_vectors(coded: CodedPart) -> Partial:
    mean = coded.partial.mean
    return Partial(mean @ coded.matrix.to(mean.dtype) + coded.offset.to(mean.dtype)[:, None], coded.partial.log_sum)


def _chunks(held: Snapshot, granule: int) -> Iterator[tuple[int, int, list[int]]]:
    """Runs of coded tokens at rising positions, in whole granules where the runs allow."""
    step = max(1, CHUNK_TOKENS // granule) * granule
    for start in range(0, held.n_coded, step):
        yield from held.offsets(start, min(held.n_coded, start + step))


def _visible(
    held: Snapshot, mask: Tensor | None, start: int, stop: int
) -> Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None:
    """The mask of one chunk, tokens that are read apart hidden."""
    here = None if mask is None else mask[:, start:stop]
    if (at := held.apart(slice(None), start, stop)) is None:
        return here
    everything = torch.ones(held.batch, stop - start, dtype=torch.bool, device=at[0].device)
    here = everything if here is None else here.clone()
    here[at[0].long(), at[1].long()] = False if here.dtype == torch.bool else -torch.inf
    return here


def _read(
    reader: Reader, packed: Any, rows: slice, start: int, stop: int, first: int, laid_out: LaidOut,
    mask: Tensor | None, settings: dict[str, Any],
) -> Partial:  # fmt: skip
    """One chunk of rows whose tokens `start` … `stop` stand at positions from `first` on, in value coefficients."""
    frames = reader.frames
    assert frames is not None, "a reader of coded tokens has frames"
    b, h, r = laid_out.queries.shape[:3]
    k, block = frames.bias.shape[-1], frames.block_tokens
    first_block = 0 if block is None else first // block
    skipped = 0 if block is None else first - first_block * block
    n_blocks = 1 if block is None else (stop - start - 1 + skipped) // block + 1
    blocks = frames.blocks(first_block, n_blocks, laid_out.queries.dtype)
    queries = blocks @ laid_out.queries  # [b h r n c]
    bias = (blocks @ laid_out.bias).unflatten(-1, (k, -1))[..., :r].permute(0, 1, 4, 2, 3) if k else None  # [b h r n k]
    if reader.codec.key.frame.joined:
        queries = queries.reshape(b, 1, h * r, n_blocks, -1)
        bias = None if bias is None else bias.reshape(b, 1, h * r, n_blocks, k)
    key_bias = bias.squeeze(-1) if bias is not None and k != block else None
    offset_bias = bias if k == block else None
    terms: dict[str, Any] = {
        "key_bias": key_bias, "offset_bias": offset_bias, "block_tokens": block, "first_offset": skipped, "mask": mask,
        **settings,
    }  # fmt: skip
    sides = [(_rows_of(packed[slot], rows, start, stop, reader.codec.side(slot))) for slot in ("key", "value")]
    if reader.key is not None and reader.value is not None:
        key, value = (_tokens(side, which) for side, which in zip(sides, (reader.key, reader.value), strict=True))
        return byte_attention(queries, key, value, path=_path("byte_attention", queries), **terms)
    assert reader.to_vectors is not None, "a reader of coded tokens maps values back"
    y, z = (_coefficients(reader.codec.side(slot), p) for slot, p in zip(("key", "value"), sides, strict=True))
    return _read_coefficients(queries, y, z[..., : reader.to_vectors.n_kept], h, **terms)


def _rows_of(packed: Packed, rows: slice, start: int, stop: int, side: SideCodec) -> Packed:
    """Some rows and tokens; views."""
    n = packed.planes.shape[-1]

    def cut(x: Tensor) -> Tensor:
        per_entry = n // x.shape[-1]
        return x[rows, ..., start // per_entry : -(-stop // per_entry)]

    return Packed(cut(packed.planes), {name: cut(x) for name, x in packed.side.items()})


def _tokens(packed: Packed, side: ByteSide) -> CodedTokens:
    return CodedTokens(packed.planes, side.tables, packed.side.get("gain"), side.gain_levels)


def _coefficients(side: SideCodec, packed: Packed) -> Float[Tensor, "b g t c"]:
    return side.quantizer.decode(Codes(side.layout.unpack(packed.planes), packed.side))


def _read_coefficients(
    queries: Float[Tensor, "b g r n c"],
    y: Float[Tensor, "b g t k"],
    z: Float[Tensor, "b #h t e"],
    n_heads: int,
    *,
    key_bias: Tensor | None,
    offset_bias: Tensor | None,
    block_tokens: int | None,
    first_offset: int,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Partial:
    """As the kernel's definition, from coefficients that are there already."""
    b, n, c = len(queries), *queries.shape[3:]
    t, dtype = y.shape[2], queries.dtype
    size = t if block_tokens is None else block_tokens
    blocks = torch.nn.functional.pad(y[..., :c].to(dtype), (0, 0, first_offset, n * size - t - first_offset))
    scores = torch.einsum("bgrnc,bgnkc->bgrnk", queries, blocks.unflatten(2, (n, size)))
    scores = scores if key_bias is None else scores + key_bias[..., None]
    scores = scores if offset_bias is None else scores + offset_bias
    scores = scores.flatten(3)[..., first_offset : first_offset + t]
    scores = capped(scores.reshape(b, n_heads, -1, t) * scale, softcap)
    scores = scores if mask is None else scores + additive(mask, dtype)[:, None, None]
    return attended(scores, z.to(dtype))
