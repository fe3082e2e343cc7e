"""Additive vector quantization of rotary pairs with codebooks that commute with the rotation.

    ŷ = Σ_stages J^{turn} e_base,   J turns every pair by 90°,   J R(n) = R(n) J

A symbol names a base entry and one of four quarter turns, so R(n) ŷ is the same symbols over turned bases: rotating the
codebook once serves every token at a position. Source: CommVQ (arXiv:2506.18879) §4: additive codebooks of 2 × 2 blocks
[[x, −y], [y, x]], which are the matrices that commute with RoPE. Here: trained by Lloyd's iteration on the orbits of J,
stage by stage on what is left over; the fitted tables are written out, so the read path is every static codec's.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.device import HOST
from karhunen.quantizers.base import QuantizerData, QuantizerSpec
from karhunen.quantizers.gains import GAIN_BITS, GainKind, split_gain
from karhunen.quantizers.kmeans import nearest
from karhunen.quantizers.vector import VectorQuantizer
from karhunen.values import refuse_unless_one_of

TURNS = 4
STAGE_BITS = 8


@final
@dataclass(frozen=True)
class CommutingVQ(QuantizerSpec):
    """Groups of `pairs` rotary pairs, (i, i + c/2) or (2i, 2i + 1) if `interleaved`, in stages of up to 8 bits."""

    pairs: int = 8
    interleaved: bool = False
    gain: GainKind = "float16"
    n_iterations: int = 25
    max_samples: int = 8192
    seed: int = 0
    needs_samples = True

    def __post_init__(self) -> None:
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))
        if self.pairs < 1:
            raise ValueError(f"pairs={self.pairs} is not a group size; use 1 or more")

    def cost(self, c: int) -> RateCost:
        """Groups of fixed size, one gain per token."""
        if c % (2 * self.pairs):
            raise ValueError(f"groups of {self.pairs} pairs do not divide the {c} coefficients of a vector")
        return RateCost(group=2 * self.pairs, token_bits=GAIN_BITS[self.gain])

    def fit(self, data: QuantizerData) -> VectorQuantizer:
        """Trains every stage of every group of every head; ValueError unless every rate is the same."""
        g, c = data.rates.shape
        self.cost(c)
        rate = float(data.rates.max())
        if bool((data.rates != rate).any()):
            raise ValueError("commuting codebooks take one rate for all coefficients; use Uniform")
        widths = _stages(round(rate * 2 * self.pairs))
        samples = data.require_samples()
        groups = self._groups(c, samples.device)  # [groups 2·pairs]
        samples = samples[:, :: max(1, -(-samples.shape[1] // self.max_samples))].double()
        if self.gain != "none":
            samples = split_gain(samples[None], self.gain)[0][0]
        rest = samples[:, :, groups].permute(0, 2, 1, 3).flatten(0, 1).float()  # [g·groups n 2·pairs]
        tables = []
        for width in widths:
            tables.append(orbit_kmeans(rest, 2**width, self.n_iterations, self.seed).to(torch.float16))
            values = tables[-1].float()
            rest = rest - values.gather(1, nearest(rest, values)[0][..., None].expand(-1, -1, rest.shape[-1]))
        n_books, n_stages = rest.shape[0], len(widths)
        device = rest.device
        stage = torch.arange(n_stages, device=device).repeat(n_books)
        return VectorQuantizer(
            g=g,
            c=c,
            gain=self.gain,
            plane_group=torch.arange(g, device=device).repeat_interleave(len(groups) * n_stages),
            plane_stage=stage,
            plane_bits=torch.tensor(widths, device=device)[stage],
            plane_size=torch.full((n_books * n_stages,), 2 * self.pairs, device=device),
            coordinates=groups.repeat_interleave(n_stages, 0).repeat(g, 1).flatten(),
            entries=torch.cat([tables[s][book].flatten() for book in range(n_books) for s in range(n_stages)]),
            scale=torch.ones(n_books * n_stages, device=device),
        )

    def _groups(self, c: int, device: torch.device) -> Int[Tensor, "groups w"]:
        """First members, then second members, of pairs dealt round so that each group has all frequencies."""
        first = torch.arange(c // 2, device=device) * (2 if self.interleaved else 1)
        second = first + (1 if self.interleaved else c // 2)
        dealt = torch.arange(c // 2, device=device).unflatten(0, (self.pairs, -1)).mT
        return torch.cat([first[dealt], second[dealt]], dim=-1)


def orbit_kmeans(
    x: Float[Tensor, "s n w"], n_entries: int, n_iterations: int, seed: int
) -> Float[Tensor, "s entries w"]:
    """Codebooks that a quarter turn maps onto themselves: the bases, then the bases turned 1, 2 and 3 times."""
    n_bases = n_entries // TURNS
    s, n, w = x.shape
    if n < n_bases:
        raise ValueError(f"{n} calibration samples cannot train {n_bases} bases; calibrate on more text")
    start = torch.randperm(n, generator=torch.Generator(HOST).manual_seed(seed), device=HOST)
    bases = x[:, start[:n_bases].sort().values.to(x.device)].clone()
    for _ in range(n_iterations):
        chosen, _ = nearest(x, orbit(bases))
        turned_back = turned(x, -(chosen // n_bases))
        base = chosen % n_bases
        mass = x.new_zeros(s, n_bases).scatter_add_(1, base, x.new_ones(s, n))
        total = x.new_zeros(s, n_bases, w).scatter_add_(1, base[..., None].expand(-1, -1, w), turned_back)
        bases = torch.where(mass[..., None] > 0, total / mass[..., None].clamp_min(1.0), bases)
    return orbit(bases)


def orbit(bases: Float[Tensor, "s m w"]) -> Float[Tensor, "s entries w"]:
    """The bases and their quarter turns."""
    return torch.cat([turned(bases, torch.full(bases.shape[:-1], k, device=bases.device)) for k in range(TURNS)], dim=1)


def turned(x: Float[Tensor, "*b w"], turns: Int[Tensor, "*b"]) -> Float[Tensor, "*b w"]:
    """J^turns x: every pair (a, b) becomes (−b, a) at each turn."""
    a, b = x.chunk(2, dim=-1)
    k = torch.remainder(turns, TURNS)[..., None]
    cos, sin = (k == 0).to(x.dtype) - (k == 2).to(x.dtype), (k == 1).to(x.dtype) - (k == 3).to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _stages(total: int) -> list[int]:
    n = -(-total // STAGE_BITS)
    widths = [total // n + (k < total % n) for k in range(n)]
    if min(widths) < 2:
        raise ValueError(f"{total} bits for a group leave no room for the four turns; use more bits or more pairs")
    return widths
