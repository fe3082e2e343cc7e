"""Vector quantization of groups of equal size, each with a codebook trained by k-means.

    group r of a permutation of the coefficients, `size` of them, 2^bits entries: bits / size per coefficient

Source: NOVA-KV (arXiv:2608.04074): 4 coefficients, 256 entries, and a stratified permutation that gives each group
nearly the same volume (rank r goes to group r mod n_groups), so that one width suits all.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import QuantizerData, QuantizerSpec, divisors
from karhunen.quantizers.gains import GAIN_BITS, split_gain
from karhunen.quantizers.kmeans import kmeans
from karhunen.quantizers.vector import VectorQuantizer

MAX_SAMPLES = 8192


@final
@dataclass(frozen=True)
class GroupVQ(QuantizerSpec):
    """`size` coefficients share a symbol; its width is the sum of their rates. `grouping` deals coefficients sorted by
    variance to groups: `stratified` (round robin) or `neighbouring`. `entries` is the stored dtype of the tables."""

    size: int = 4
    grouping: Literal["stratified", "neighbouring"] = "stratified"
    gain: bool = True
    entries: Literal["float16", "float8_e5m2"] = "float16"
    n_iterations: int = 25
    seed: int = 0
    needs_moments = True
    needs_samples = True

    def __post_init__(self) -> None:
        if self.grouping not in ("stratified", "neighbouring"):
            raise ValueError(f"unknown grouping {self.grouping!r}; known: stratified, neighbouring")
        if self.size < 1:
            raise ValueError(f"size={self.size} is not a group; use 1 or more")

    def cost(self, c: int) -> RateCost:
        """Groups of fixed size, one gain per token."""
        if c % self.size:
            raise ValueError(f"size={self.size} does not divide the {c} coefficients of a vector; use {divisors(c)}")
        return RateCost(group=self.size, token_bits=GAIN_BITS if self.gain else 0)

    def fit(self, data: QuantizerData) -> VectorQuantizer:
        """Codebooks of every group of every head at once."""
        g, c = data.rates.shape
        self.cost(c)
        order = self._order(data)  # [g groups size]
        samples = data.require_samples()
        stride = max(1, -(-samples.shape[1] // MAX_SAMPLES))
        samples = samples[:, ::stride].double()
        if self.gain:
            samples = split_gain(samples[None])[0][0]
        bits = data.rates.double().gather(1, order.flatten(1)).unflatten(1, (-1, self.size)).sum(-1).round().int()
        n_groups = c // self.size
        x = samples.gather(2, order.flatten(1)[:, None].expand(-1, samples.shape[1], -1))
        x = x.unflatten(-1, (n_groups, self.size)).transpose(1, 2).flatten(0, 1)  # [g*groups n size]
        planes = bits.flatten()
        tables = torch.cat([kmeans(x[j : j + 64], 2 ** int(planes[j]), self.n_iterations, self.seed)
                            for j in range(0, len(planes), 64)])  # fmt: skip
        stored, scale = store_entries(tables, self.entries)
        return VectorQuantizer(
            g=g,
            c=c,
            gain=self.gain,
            plane_group=torch.arange(g).repeat_interleave(n_groups),
            plane_stage=torch.zeros(g * n_groups, dtype=torch.int64),
            plane_bits=planes.long(),
            plane_size=torch.full((g * n_groups,), self.size),
            coordinates=order.flatten(),
            entries=stored.flatten(),
            scale=scale,
        )

    def _order(self, data: QuantizerData) -> Int[Tensor, "g groups size"]:
        variance = data.require_moments().covariance.diagonal(dim1=-2, dim2=-1)
        rank = variance.sort(dim=-1, descending=True, stable=True).indices
        if self.grouping == "stratified":
            return rank.unflatten(-1, (self.size, -1)).mT.contiguous()
        return rank.unflatten(-1, (-1, self.size))


def store_entries(tables: Float[Tensor, "s e w"], dtype: str) -> tuple[Tensor, Float[Tensor, " s"]]:
    """Tables in their stored dtype and the scale of each; float8 entries are scaled so that the largest fits."""
    if dtype == "float8_e5m2":
        scale = tables.abs().amax((-2, -1)).clamp_min(1e-30) / 8.0
        return (tables / scale[:, None, None]).to(torch.float8_e5m2), scale.float()
    return tables.clamp(-6e4, 6e4).to(torch.float16), torch.ones(tables.shape[0])
