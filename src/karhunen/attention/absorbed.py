"""Attention in the coefficients: no key and no value is rebuilt. SPECTRA's Mode B, exact under RoPE.

κ_n = y_n T⁻¹ + μ,   R(−n₀) k_n = κ_n:   qᵀ k_n = (R(−n₀) q)ᵀ κ_n = (T⁻ᵀ R(−n₀) q)ᵀ y_n + (R(−n₀) q)ᵀ μ
v_n = z_n S⁻¹ + ν:   Σ_n a_n v_n = (Σ_n a_n z_n) S⁻¹ + ν,   and S⁻¹ W_O may be one matrix

Source: SPECTRA (arXiv:2608.07915), which absorbs values and leaves keys under RoPE open. Here: the query turns once for
each block of B tokens (frames/rope_frame.py), so the inverse transform meets the query t / B times, never a key; B = 1
is exact too and pays it for every token. Where B is infinite (NOVA-KV) the term of μ is one number for a query and
would drop out of its softmax; it is kept, since coded tokens are merged with exact ones and with learned sinks.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.codec import LayerCodec, Packed, SideCodec
from karhunen.device import HOST
from karhunen.frames.rope_frame import split_heads
from karhunen.kernels.softmax import Partial, attended
from karhunen.quantizers.affine import AffineQuantizer
from karhunen.quantizers.base import Codes


@final
@dataclass(frozen=True)
class InverseMap:
    """From the kept coefficients to one head's vectors: x = y[kept] A + offset. With joined heads all of them read the
    same coefficients (g = 1)."""

    matrix: Float[Tensor, "h r d"]
    offset: Float[Tensor, "h d"]
    n_kept: int

    @classmethod
    def of(cls, side: SideCodec, n_coefficients: int) -> "InverseMap":
        """What the transform does to unit vectors, by head; trailing coefficients that get no bits are left out."""
        g = 1 if side.frame.joined else side.n_heads
        eye = torch.eye(n_coefficients, dtype=torch.float64, device=side.device or HOST)
        probe = torch.cat([eye.new_zeros(1, n_coefficients), eye]).expand(1, g, -1, -1)
        images = side.transform.inverse(probe)
        images = (split_heads(images, side.n_heads) if side.frame.joined else images)[0]  # [h 1+c d]
        n_kept = _n_kept(side, n_coefficients)
        return cls(images[:, 1 : 1 + n_kept] - images[:, :1], images[:, 0], n_kept)

    def to(self, dtype: torch.dtype) -> "InverseMap":
        """In the precision attention runs in."""
        return InverseMap(self.matrix.to(dtype), self.offset.to(dtype), self.n_kept)


@final
@dataclass(frozen=True)
class Absorbed:
    """One layer's codec, ready to be read in its coefficients. Make it once; it holds no token."""

    codec: LayerCodec
    key: InverseMap
    value: InverseMap

    @classmethod
    def of(cls, codec: LayerCodec, key_dim: int, value_dim: int, dtype: torch.dtype = torch.float32) -> "Absorbed":
        """ValueError where the values are in a frame that turns, whose weighted sum is no vector of a head."""
        turns = codec.value.frame.needs_rotary or codec.value.mean is not None
        if codec.value.rotary is not None and turns:
            raise ValueError(
                "values of a frame that turns (latent attention) cannot be summed in their coefficients; decode them"
            )
        maps = [
            InverseMap.of(side, side.n_heads * dim if side.frame.joined else dim).to(dtype)
            for side, dim in ((codec.key, key_dim), (codec.value, value_dim))
        ]
        return cls(codec, maps[0], maps[1])

    def output_weight(self, weight: Float[Tensor, "hidden n"]) -> Float[Tensor, "q r hidden"]:
        """S⁻¹ W_O of each query head: what W_O becomes. `weight` is stored [outputs, inputs]."""
        heads = self.value.matrix.shape[0]
        per_head = weight.mT.to(self.value.matrix.dtype).unflatten(0, (heads, -1, self.value.matrix.shape[-1]))
        return (self.value.matrix[:, None] @ per_head).flatten(0, 1)


def attend(
    layer: Absorbed,
    key: Packed,
    value: Packed,
    positions: Int[Tensor, "b t"],
    query: Float[Tensor, "b q m d"],
    scale: float,
) -> Partial:
    """As `reference.attend`, without decoding."""
    sums = attend_coefficients(layer, key, value, positions, query, scale)
    h = layer.codec.value.n_heads
    out = sums.mean.unflatten(1, (h, -1)) @ layer.value.matrix[:, None] + layer.value.offset[:, None, None]
    if (mean := layer.codec.value.mean) is not None:
        out = out + mean.to(out.dtype)[:, None, None]
    return Partial(out.flatten(1, 2), sums.log_sum)


def attend_coefficients(
    layer: Absorbed,
    key: Packed,
    value: Packed,
    positions: Int[Tensor, "b t"],
    query: Float[Tensor, "b q m d"],
    scale: float,
) -> Partial:
    """Weighted sums of value coefficients, per query head; `output_weight` takes these straight to the hidden state."""
    h = layer.codec.key.n_heads
    y = _coefficients(layer.codec.key, key)[..., : layer.key.n_kept].to(query.dtype)
    z = _coefficients(layer.codec.value, value)[..., : layer.value.n_kept].to(query.dtype)
    rows = [
        _scores(layer, y[b : b + 1], positions[b], query[b : b + 1].unflatten(1, (h, -1))) for b in range(len(query))
    ]
    part = attended(torch.cat(rows) * scale, z[:, :, None])
    return Partial(part.mean.flatten(1, 2), part.log_sum.flatten(1, 2))


def _scores(
    layer: Absorbed, y: Float[Tensor, "1 g t r"], positions: Int[Tensor, " t"], query: Float[Tensor, "1 h q m d"]
) -> Float[Tensor, "1 h q m t"]:
    """qᵀ k̂_n of one sequence; the query meets the inverse transform once for each block."""
    side = layer.codec.key
    starts, sizes = side.frame.starts(positions).unique_consecutive(return_counts=True)
    turning = side.rotary is not None and side.frame.needs_rotary
    if turning:
        assert side.rotary is not None, "a turning frame has a rotation"
        copies = query[..., None, :].expand(*query.shape[:-1], len(starts), -1)
        turned = side.rotary.rotate(copies, -starts[None]).to(query.dtype)
    else:
        turned = query[..., None, :].expand(*query.shape[:-1], len(starts), -1)  # [1 h q m blocks d]
    folded = torch.einsum("bhqmnd,hrd->bhqmnr", turned, layer.key.matrix)
    constant = torch.einsum("bhqmnd,hd->bhqmn", turned, layer.key.offset)
    parts = [
        folded[..., i, :] @ block[:, :, None].mT + constant[..., i, None]
        for i, block in enumerate(y.split(sizes.tolist(), dim=2))
    ]
    scores = torch.cat(parts, dim=-1)
    return scores if side.mean is None else scores + _mean_scores(side, positions, query)


def _mean_scores(
    side: SideCodec, positions: Int[Tensor, " t"], query: Float[Tensor, "1 h q m d"]
) -> Float[Tensor, "1 h q m t"]:
    """qᵀ R(n) μ, what a centered frame took away: one vector per position and head, whatever was cached."""
    assert side.mean is not None, "only a centered frame has a mean"
    still = side.mean[:, None].to(query.dtype).expand(-1, len(positions), -1)
    turned = still if side.rotary is None else side.rotary.rotate(still, positions[None]).to(query.dtype)
    return query @ turned[None, :, None].mT


def _coefficients(side: SideCodec, packed: Packed) -> Float[Tensor, "b g t c"]:
    return side.quantizer.decode(Codes(side.layout.unpack(packed.planes), packed.side))


def _n_kept(side: SideCodec, n_coefficients: int) -> int:
    if not isinstance(side.quantizer, AffineQuantizer):
        return n_coefficients
    used = (side.quantizer.bits > 0).any(0).nonzero()
    return int(used.max()) + 1 if len(used) else 1
