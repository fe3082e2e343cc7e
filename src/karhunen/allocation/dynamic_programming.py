"""Widths from a short menu, so that the squared error is least within the budget: a knapsack, solved exactly.

    minimise Σ_i n_i λ_i 2^{−2 w_i}   subject to   Σ_i (n_i w_i + overhead [w_i > 0]) ≤ B,   w_i ∈ {0, 2, 4, 8}

Source: KVTC (arXiv:2511.01815): dynamic programming over groups of principal components with 0, 2, 4 or 8 bits.
Here:   the error is the one a coefficient of that variance has at that rate; groups are the quantizer's own. The work
        is groups × budget in units of the greatest common divisor of all costs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import Allocation, RateCost
from karhunen.device import HOST

K = TypeVar("K")
FRACTION = 64  # overheads are counted in 1/64 bit


@final
@dataclass(frozen=True)
class DynamicProgramming(Allocation):
    """At most `bits` stored per coefficient on average, side information included, over each layer's side or over the
    model."""

    bits: float = 2.0
    widths: tuple[int, ...] = (0, 2, 4, 8)
    scope: Literal["head", "layer", "model"] = "layer"
    needs_spectrum = True

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 16:
            raise ValueError(f"bits={self.bits} is out of range; use more than 0 and at most 16")
        if self.scope not in ("head", "layer", "model"):
            raise ValueError(f"unknown scope {self.scope!r}; known: head, layer, model")
        if not self.widths or min(self.widths) != 0 or max(self.widths) > 16:
            raise ValueError(f"widths={self.widths} must hold 0, and nothing above 16")

    def rates(
        self, spectra: Mapping[K, Float[Tensor, "g c"]], costs: Mapping[K, RateCost]
    ) -> dict[K, Float[Tensor, "g c"]]:
        """One knapsack for each scope."""
        if self.scope == "model":
            return self._fill(spectra, costs)
        rates: dict[K, Tensor] = {}
        for key, spectrum in spectra.items():
            parts = spectrum[:, None] if self.scope == "head" else spectrum[None]
            rates[key] = torch.cat([self._fill({key: part}, costs)[key] for part in parts])
        return rates

    def _fill(self, spectra: Mapping[K, Tensor], costs: Mapping[K, RateCost]) -> dict[K, Tensor]:
        size = {key: math.gcd(costs[key].group, s.shape[-1]) for key, s in spectra.items()}
        energy = {key: s.double().unflatten(-1, (-1, size[key])).sum(-1) for key, s in spectra.items()}  # [g groups]
        fixed = sum(costs[key].token_bits * s.shape[0] for key, s in spectra.items())
        budget = self.bits * sum(s.numel() for s in spectra.values()) - fixed
        flat = torch.cat([e.flatten() for e in energy.values()])
        price = [self._prices(costs[key], size[key]) for key, e in energy.items() for _ in range(e.numel())]
        widths = knapsack(flat, self.widths, price, math.floor(budget * FRACTION))
        chosen = torch.tensor(widths, dtype=torch.float64, device=flat.device)
        if not bool(chosen.any()):
            raise ValueError(
                f"a budget of {budget:.0f} bits per token is too small for a single group of {max(size.values())} "
                "coefficients; use more bits or a smaller group"
            )
        parts = chosen.split([e.numel() for e in energy.values()])
        return {
            key: part.reshape(energy[key].shape).repeat_interleave(size[key], dim=-1)
            for key, part in zip(energy, parts, strict=True)
        }

    def _prices(self, cost: RateCost, size: int) -> tuple[int, ...]:
        """Of each width for one group, in 1/64 bit; a width the quantizer cannot do is beyond every budget."""
        overhead = round(cost.overhead_bits * FRACTION)
        return tuple((size * w * FRACTION + overhead * (w > 0)) if w <= cost.max_bits else 1 << 60 for w in self.widths)


def knapsack(
    energy: Float[Tensor, " m"], widths: tuple[int, ...], prices: list[tuple[int, ...]], budget: int
) -> list[int]:
    """The width of each of `m` items: least Σ energy · 2^{−2w} whose prices sum to at most `budget`."""
    within = [p for row in prices for p in row if 0 < p <= budget]
    unit = math.gcd(*within) if within else 1
    n_states = max(0, budget) // unit + 1
    scale = float(energy.max()) or 1.0
    least = torch.zeros(
        n_states, dtype=torch.float64, device=HOST
    )  # least error of the items so far, by units spent at most
    choices: list[Tensor] = []
    for item, row in zip((energy / scale).tolist(), prices, strict=True):
        options = torch.full((len(widths), n_states), math.inf, dtype=torch.float64, device=HOST)
        for k, (width, price) in enumerate(zip(widths, row, strict=True)):
            if price <= max(0, budget):
                options[k, price // unit :] = least[: n_states - price // unit] + item * 4.0**-width
        least, chosen = options.min(0)
        choices.append(chosen)
    left, found = n_states - 1, [0] * len(prices)
    for i in reversed(range(len(prices))):
        k = int(choices[i][left])
        found[i] = widths[k]
        left -= prices[i][k] // unit
    return found
