"""Product and residual vector quantization: groups of equal size, each with codebooks trained by k-means.

    `size` coefficients share a symbol as wide as the sum of their rates;  with `depth` > 1 the symbol is split into
    that many, each coding what the ones before left over

Source: NOVA-KV (arXiv:2608.04074): 4 coefficients, 256 entries, one stage; product quantization (Jégou et al., 2011);
residual VQ (Juang & Gray, 1982). Grouping, of coefficients in the order of their variance:
`stratified` deals rank r to group r mod n_groups (the seed's), `equal_volume` makes the products of the groups'
variances as equal as a greedy assignment can (what the seed argues for), `neighbouring` takes them as they come.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import QuantizerData, QuantizerSpec, divisors
from karhunen.quantizers.gains import GAIN_BITS, GainKind
from karhunen.quantizers.planes import ENTRY_KINDS, EntryKind, Plane, Training, train
from karhunen.quantizers.vector import VectorQuantizer
from karhunen.values import refuse_unless_one_of

GROUPINGS = ("stratified", "equal_volume", "neighbouring")
MAX_SYMBOL_BITS = 12  # 4,096 entries; more is neither trainable on a calibration text nor quick to search


@final
@dataclass(frozen=True)
class GroupVQ(QuantizerSpec):
    """Groups of `size` coefficients in `depth` stages; `entries` is the stored dtype of the tables."""

    size: int = 4
    depth: int = 1
    grouping: Literal["stratified", "equal_volume", "neighbouring"] = "stratified"
    gain: GainKind = "float16"
    entries: EntryKind = "float16"
    n_iterations: int = 25
    max_samples: int = 8192
    seed: int = 0
    needs_moments = True
    needs_samples = True

    def __post_init__(self) -> None:
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))
        refuse_unless_one_of("entries", self.entries, ENTRY_KINDS)
        if self.grouping not in GROUPINGS:
            raise ValueError(f"unknown grouping {self.grouping!r}; known: {', '.join(GROUPINGS)}")
        if self.size < 1 or self.depth < 1:
            raise ValueError(f"size={self.size} and depth={self.depth} count coefficients and stages; use 1 or more")

    def cost(self, c: int) -> RateCost:
        """Groups of fixed size, one gain per token."""
        if c % self.size:
            raise ValueError(f"size={self.size} does not divide the {c} coefficients of a vector; use {divisors(c)}")
        return RateCost(group=self.size, token_bits=GAIN_BITS[self.gain])

    def fit(self, data: QuantizerData) -> VectorQuantizer:
        """Trains every stage of every group of every head."""
        g, c = data.rates.shape
        self.cost(c)
        order = group_order(data.require_moments().covariance.diagonal(dim1=-2, dim2=-1), self.size, self.grouping)
        planes = [
            Plane(head, tuple(group), bits, stage)
            for head in range(g)
            for group in order[head].tolist()
            for stage, bits in enumerate(self._split(float(data.rates[head][group].sum())))
        ]
        return train(
            planes, data, self.gain, Training(self.n_iterations, self.seed, self.max_samples, entries=self.entries)
        )

    def _split(self, bits: float) -> list[int]:
        total = round(bits)
        stages = [total // self.depth + (k < total % self.depth) for k in range(self.depth)]
        if max(stages) > MAX_SYMBOL_BITS:
            raise ValueError(
                f"{self.size} coefficients at {bits / self.size:g} bits need 2^{max(stages)} entries, at most 2^"
                f"{MAX_SYMBOL_BITS} are trained; use a smaller size, fewer bits or depth={-(-total // MAX_SYMBOL_BITS)}"
            )
        return [width for width in stages if width > 0]


def group_order(variance: Float[Tensor, "g c"], size: int, grouping: str) -> Int[Tensor, "g groups size"]:
    """Which coefficients form each group."""
    rank = variance.sort(dim=-1, descending=True, stable=True).indices
    if grouping == "stratified":
        return rank.unflatten(-1, (size, -1)).mT.contiguous()
    if grouping == "neighbouring":
        return rank.unflatten(-1, (-1, size))
    return torch.stack([_equal_volume(variance[head], rank[head].tolist(), size) for head in range(len(rank))])


def _equal_volume(variance: Float[Tensor, " c"], rank: list[int], size: int) -> Int[Tensor, "groups size"]:
    """Largest first, each to the group of least volume that has room."""
    log_variance = variance.double().clamp_min(1e-30).log()
    log_variance = (log_variance - log_variance.min()).tolist()
    groups: list[list[int]] = [[] for _ in range(len(rank) // size)]
    volume = [0.0] * len(groups)
    for i in rank:
        open_groups = [k for k, members in enumerate(groups) if len(members) < size]
        k = min(open_groups, key=lambda k: (volume[k], k))
        groups[k].append(i)
        volume[k] += log_variance[i]
    return torch.tensor(groups, device=variance.device)
