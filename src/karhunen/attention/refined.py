"""How coded tokens that have refinements are read: by the scan itself, or apart, by torch, where it has no such kernel.

    apart   base bytes + layers ─▶ coefficients ─▶ scores against each block's query, one softmax ─▶ partial

Nothing is transformed back per token. A scan of the base alone skips these tokens, and log-sums merge both parts.
"""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.attention.frame_queries import FrameQueries, LaidOut
from karhunen.attention.reader import Reader
from karhunen.codec import LayerCodec, Packed
from karhunen.kernels.byte_attention.naive import additive
from karhunen.kernels.scan_attention import Layers
from karhunen.kernels.softmax import Partial, attended, capped, merge_partials
from karhunen.quantizers.base import Codes
from karhunen.quantizers.embedded import EmbeddedQuantizer
from karhunen.statistics.need import SLOTS, Slot
from karhunen.store.refinements import RowRefined
from karhunen.store.snapshot import Snapshot


def layers_of(reader: Reader, held: Snapshot) -> Layers | None:
    """What the scan is told of refinements, made once for as long as nothing changes; None where no token has any."""
    refined = held.refined
    if refined is None:
        return None
    made: tuple[Layers, LayerCodec] | None = refined.prepared.get("layers")
    if made is None or made[1] is not reader.codec:
        parts = (cast("EmbeddedQuantizer", reader.codec.side(slot).quantizer).parts[1:] for slot in SLOTS)
        tables = tuple((key.byte_tables, value.byte_tables) for key, value in zip(*parts, strict=True))
        made = Layers(refined.heat, refined.least, refined.layers, tables), reader.codec
        refined.prepared["layers"] = made
    return made[0]


def refined_attention(
    reader: Reader,
    held: Snapshot,
    query: Float[Tensor, "b h r d"],
    scale: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Partial:
    """Of every row of `query`, as vectors; `mask` `[b t]` is over all coded tokens. A row of the batch without refined
    tokens has a log-sum of −∞."""
    assert held.refined is not None and reader.frames is not None and reader.to_vectors is not None, "some are refined"
    classes = held.refined.classes
    laid_out = reader.frames.lay_out(query)
    found: list[Partial] = []
    for row in range(held.batch):
        parts = [
            _run(reader, held, query[row : row + 1], laid_out[row : row + 1], row, start, stop, first[row], classes,
                 scale, softcap, mask)
            for start, stop, first in held.offsets(0, held.n_coded)
        ]  # fmt: skip
        found.append(parts[0] if len(parts) == 1 else merge_partials(parts))
    maps = reader.to_vectors
    mean = torch.cat([part.mean for part in found])
    vectors = mean @ maps.matrix.to(mean.dtype) + maps.offset.to(mean.dtype)[:, None]
    return Partial(vectors, torch.cat([part.log_sum for part in found]))


def _run(
    reader: Reader, held: Snapshot, query: Tensor, laid_out: LaidOut, row: int, start: int, stop: int, first: int,
    classes: Int[Tensor, "b t"], scale: float, softcap: float | None, mask: Tensor | None,
) -> Partial:  # fmt: skip
    """Of one row's tokens `start` … `stop`, which stand at positions from `first` on; in value coefficients."""
    assert held.refined is not None and held.packed is not None and reader.frames is not None, "some are refined"
    assert reader.to_vectors is not None, "a reader of coded tokens maps values back"
    mine = held.refined.row(row, start, stop, classes)
    h, r = query.shape[1:3]
    if not len(mine.tokens):
        nothing = query.new_zeros(1, h, r, reader.to_vectors.matrix.shape[1])
        return Partial(nothing, nothing[..., 0] - torch.inf)
    y, z = (coefficients(reader.codec, slot, held.packed[slot], mine, row, start) for slot in SLOTS)
    scores = capped(_scores(reader.frames, laid_out, y, first + mine.tokens, h, r) * scale, softcap)
    if mask is not None:
        scores = scores + additive(mask[row : row + 1, start:stop][:, mine.tokens], scores.dtype)[:, None, None]
    return attended(scores, z.to(scores.dtype))


def coefficients(
    codec: LayerCodec, slot: Slot, packed: Packed, mine: RowRefined, row: int, start: int
) -> Float[Tensor, "1 g n c"]:
    """Base and layers of the tokens in `mine`, added up."""
    quantizer = codec.side(slot).quantizer
    assert isinstance(quantizer, EmbeddedQuantizer), "only embedded codes have layers"
    base = packed.planes[row : row + 1][:, :, start + mine.tokens]
    made = quantizer.base.decode(Codes(base, {}))
    for layer, part in enumerate(quantizer.parts[1:]):
        planes = mine.layers[layer][SLOTS.index(slot)]
        if planes.shape[1]:
            made[:, :, mine.having(layer)] += part.decode(Codes(planes[None], {}))
    return made


def _scores(
    frames: FrameQueries, laid_out: LaidOut, y: Float[Tensor, "1 g n c"], positions: Int[Tensor, " n"], h: int, r: int
) -> Float[Tensor, "1 h r n"]:
    """Tokens are laid out block by block, as wide as the block with most of them, to meet its query in one product."""
    block, k = frames.block_tokens, frames.bias.shape[-1]
    index = torch.zeros_like(positions) if block is None else positions // block
    first = int(index[0])
    index = index - first
    count = torch.bincount(index)
    rank = torch.arange(len(index), device=index.device) - (count.cumsum(0) - count)[index]
    n_blocks, width = len(count), int(count.max())
    blocks = frames.blocks(first, n_blocks, laid_out.queries.dtype)
    queries = blocks @ laid_out.queries  # [1 h r n c]
    g = y.shape[1]
    place = index * width + rank
    padded = y.new_zeros(1, g, n_blocks * width, y.shape[-1])
    padded[:, :, place] = y
    c = queries.shape[-1]
    queries = queries.reshape(1, g, h * r // g, n_blocks, c)
    found = torch.einsum("bgrnc,bgnwc->bgrnw", queries, padded[..., :c].unflatten(2, (n_blocks, width)).to(queries))
    scores = found.flatten(3)[..., place].reshape(1, h, r, -1)
    if not k:
        return scores
    bias = (blocks @ laid_out.bias).unflatten(-1, (k, -1))[..., :r].permute(0, 1, 4, 2, 3)  # [1 h r n k]
    offset = positions - (index + first) * block if block is not None and k == block else torch.zeros_like(index)
    return scores + bias[:, :, :, index, offset]
