"""The definition: turn the query into the frame of each block, then attend as karhunen.kernels.byte_attention does."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels.byte_attention import naive as byte_attention
from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.scan_attention.frames import Frames, require_agreement
from karhunen.kernels.scan_attention.layers import Layers, require_layers
from karhunen.kernels.softmax import Partial


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
) -> Partial:
    """In the dtype of `query`."""
    require_agreement(query, keys, values, frames, mask)
    b, h, r, _ = query.shape
    block = frames.block_tokens
    t = keys.n_tokens
    first_block = 0 if block is None else first_position // block
    n_blocks = 1 if block is None else max(0, first_position + t - 1) // block - first_block + 1
    starts = (first_block + torch.arange(n_blocks, device=query.device)) * (block or 0)
    turned = rotated(query[:, :, :, None], frames, -starts)  # [b h r n d]
    q_frames = torch.einsum("bhrnd,hdc->bhrnc", turned, frames.matrix.to(query))
    bias = torch.einsum("bhrnd,hd->bhrn", turned, frames.offset.to(query))
    places = torch.arange(block or 1, device=query.device)
    mean = rotated(frames.mean.to(query)[:, None], frames, places)  # [h k d]
    offset_bias = torch.einsum("bhrnd,hkd->bhrnk", turned, mean)
    if block is None:
        bias, offset_bias = bias + offset_bias[..., 0], None
    if hidden is not None:
        mask = torch.zeros(b, t, dtype=query.dtype, device=query.device) if mask is None else additive(mask, query)
        mask[hidden[0].long(), hidden[1].long()] = -torch.inf
    grouped = keys.tables.n_heads != h  # joined heads: one table for all
    if grouped:
        q_frames, bias = (x.reshape(b, 1, h * r, *x.shape[3:]) for x in (q_frames, bias))
        offset_bias = None if offset_bias is None else offset_bias.reshape(b, 1, h * r, n_blocks, -1)
    sides = [byte_attention.decoded(side, query.dtype) for side in (keys, values)]
    if layers is not None:
        require_layers(layers, keys, values)
        for side, coefficients in enumerate(sides):
            _refine(coefficients, layers, side)
    found = byte_attention.of_coefficients(
        q_frames, *sides, key_bias=bias, offset_bias=offset_bias, block_tokens=block,
        first_offset=0 if block is None else first_position - first_block * block,
        scale=scale, softcap=softcap, mask=mask,
    )  # fmt: skip
    return Partial(found.mean.reshape(b, h, r, -1), found.log_sum.reshape(b, h, r))


def _refine(coefficients: Float[Tensor, "b g t c"], layers: Layers, side: int) -> None:
    """Add to coefficients what the layers of keys (side 0) or of values (1) say."""
    first, t = layers.first, coefficients.shape[2]
    for least, codes, tables in zip(layers.least, layers.codes, layers.tables, strict=True):
        planes = slice(0, tables[0].n_planes) if side == 0 else slice(tables[0].n_planes, None)
        for row, held in enumerate(codes):
            has = layers.heat[row].int() >= least  # a least heat may lie above what a byte holds
            before, here = int(has[:first].sum()), has[first : first + t].nonzero()[:, 0]
            mine = CodedTokens(held[None, planes, before : before + len(here)], tables[side])
            coefficients[row][:, here] += byte_attention.decoded(mine, coefficients.dtype)[0]


def rotated(x: Float[Tensor, "*b _ d"], frames: Frames, positions: Int[Tensor, " n"]) -> Float[Tensor, "*b _ d"]:
    """R(position) x for vectors [..., n, d] (or 1 in place of n), in float64."""
    if not frames.frequencies:
        return x
    first, second, frequencies = _turning(frames, x.device)
    angle = positions.double()[:, None] * frequencies
    wide = x.double().expand(*x.shape[:-2], len(positions), x.shape[-1]).clone()
    a, b = wide[..., first], wide[..., second]
    wide[..., first] = a * angle.cos() - b * angle.sin()
    wide[..., second] = a * angle.sin() + b * angle.cos()
    return wide.to(x.dtype)


def _turning(frames: Frames, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The halves of the pairs and their frequencies as tensors, made once for a device."""
    name = f"turning {device}"
    if name not in frames.prepared:
        halves = (torch.tensor(half, device=device) for half in (frames.first, frames.second))
        frames.prepared[name] = *halves, torch.tensor(frames.frequencies, dtype=torch.float64, device=device)
    return frames.prepared[name]


def additive(mask: Tensor, like: Tensor) -> Tensor:
    """The mask as a term of the scores, a copy."""
    return byte_attention.additive(mask, like.dtype).clone()
