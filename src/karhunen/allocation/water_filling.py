"""Reverse water-filling: spend bits only on coefficients that stand above the water line.

    b_i = max(0, ½ log2(λ_i / θ)),    θ such that Σ b_i = B

Source: Cover & Thomas, Elements of Information Theory, 2nd ed., Theorem 10.3.3; SPECTRA (arXiv:2608.07915).
Here:   a group of coefficients counts with the geometric mean of its variances; a group is worth its overhead (scale)
        only if the distortion it saves pays for all its bits at the slope of the rest; the budget holds everything
        stored; bits become integers by largest remainder (rounding.py), never by truncation; what whole groups leave
        of a head's or layer's budget goes to the next one, so that the model meets its rate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import Allocation, RateCost
from karhunen.allocation.rounding import to_integers
from karhunen.allocation.units import units_by_return

K = TypeVar("K")
FLOOR = 1e-30  # a variance of zero gets no bits, and its logarithm stays finite


@final
@dataclass(frozen=True)
class WaterFilling(Allocation):
    """`bits` stored per coefficient on average, side information included, over each head, layer or the model.

    `token_bytes` states the budget of the whole model instead: bytes of one token, keys and values of all coded layers
    together.
    """

    bits: float
    scope: Literal["head", "layer", "model"] = "layer"
    token_bytes: int | None = None
    needs_spectrum = True

    def __post_init__(self) -> None:
        if self.token_bytes is not None and (self.token_bytes < 1 or self.scope != "model"):
            raise ValueError(
                f"token_bytes={self.token_bytes} is a budget of the whole model, of 1 byte or more; "
                f"the scope is {self.scope!r}"
            )
        if not 0 < self.bits <= 16:
            raise ValueError(f"bits={self.bits} is out of range; use more than 0 and at most 16")
        if self.scope not in ("head", "layer", "model"):
            raise ValueError(f"unknown scope {self.scope!r}; known: head, layer, model")

    def rates(
        self, spectra: Mapping[K, Float[Tensor, "g c"]], costs: Mapping[K, RateCost]
    ) -> dict[K, Float[Tensor, "g c"]]:
        """One water line for each scope."""
        if self.scope == "model":
            return self._fill(spectra, costs)
        rates: dict[K, Tensor] = {}
        left = 0.0
        for key, spectrum in spectra.items():
            filled: list[Tensor] = []
            for part in spectrum[:, None] if self.scope == "head" else spectrum[None]:
                budget = self.bits * part.numel() + left
                filled.append(self._fill({key: part}, costs, left)[key])
                left = budget - stored_bits(filled[-1], costs[key]) if costs[key].integer else 0.0
            rates[key] = torch.cat(filled)
        return rates

    def _fill(self, spectra: Mapping[K, Tensor], costs: Mapping[K, RateCost], left: float = 0.0) -> dict[K, Tensor]:
        size = {key: math.gcd(costs[key].group, s.shape[-1]) for key, s in spectra.items()}
        means = {key: _geometric_mean(s, size[key]) for key, s in spectra.items()}  # [g groups]
        flat = torch.cat([m.flatten() for m in means.values()])
        if float(flat.max()) <= 2 * FLOOR:  # nothing moves (a layer of zeros): any will do, and the first get the bits
            flat = torch.logspace(0, -6, len(flat), dtype=flat.dtype, device=flat.device)
        n = torch.cat([m.new_full((m.numel(),), float(size[k])) for k, m in means.items()]).double()
        overhead = torch.cat([m.new_full((m.numel(),), costs[k].overhead_bits) for k, m in means.items()]).double()
        most = torch.cat([m.new_full((m.numel(),), float(costs[k].max_bits)) for k, m in means.items()]).double()
        fixed = sum(costs[key].token_bits * s.shape[0] for key, s in spectra.items())
        n_coefficients = sum(s.numel() for s in spectra.values())
        stored = self.bits * n_coefficients if self.token_bytes is None else 8 * self.token_bytes
        budget = stored - fixed + left
        if budget <= 0:
            raise ValueError(f"{stored:.0f} bits per token do not even pay for the {fixed:.0f} bits of gains")
        ideal = ideal_bits(flat, n, overhead, most, budget)
        if next(iter(costs.values())).integer:
            ideal = _whole(ideal, n, overhead, most, budget)
            least = torch.cat([m.new_full((m.numel(),), float(costs[k].least_bits)) for k, m in means.items()])
            ideal = _at_least(ideal, flat, least.double(), n, overhead, most)
        parts = ideal.split([m.numel() for m in means.values()])
        filled = {
            key: part.reshape(means[key].shape).repeat_interleave(size[key], dim=-1)
            for key, part in zip(means, parts, strict=True)
        }
        return _in_units(filled, means, costs, budget) if any(costs[key].unit_bits for key in filled) else filled


def stored_bits(rates: Float[Tensor, "g c"], cost: RateCost) -> float:
    """Bits of one token at these rates: symbols, the ranges of groups that are kept, and gains."""
    group = math.gcd(cost.group, rates.shape[-1])
    n_kept = int((rates.unflatten(-1, (-1, group))[..., 0] > 0).sum())
    return float(rates.sum()) + n_kept * cost.overhead_bits + rates.shape[0] * cost.token_bits


def one_budget(bits: float, usual_bits: float, ratio: float | None, token_bytes: int | None) -> float:
    """Bits stored per coefficient, of a budget that is said once: as `bits`, which are `usual_bits` if nobody gave any,
    as `ratio` or as `token_bytes`. ValueError if it is said in several ways."""
    given = {"bits": None if bits == usual_bits else bits, "ratio": ratio, "token_bytes": token_bytes}
    said = [f"{name}={value}" for name, value in given.items() if value is not None]
    if len(said) > 1:
        raise ValueError(f"{' and '.join(said)} each say the budget; give one of them")
    return bits if ratio is None else bits_for(ratio)


def bits_for(ratio: float) -> float:
    """Bits stored per coefficient that make an uncompressed 16-bit cache `ratio` times as large as the coded one."""
    if not ratio >= 1:
        raise ValueError(f"ratio={ratio} is not a compression ratio; use 1 or more, such as 8")
    return 16 / ratio


def _in_units(
    rates: Mapping[K, Tensor], means: Mapping[K, Tensor], costs: Mapping[K, RateCost], budget: float
) -> dict[K, Tensor]:
    """Head groups get whole units (bytes), and each is filled again to its own sum."""
    unit = max(costs[key].unit_bits for key in rates)
    spectra = [row for key in rates for row in means[key]]
    losses = [costs[key].loss for key in rates for _ in means[key]]
    most_bits = max(costs[key].max_bits for key in rates)
    units = units_by_return(spectra, unit, math.floor(budget / unit + 1e-6), most_bits, losses)
    filled: dict[K, Tensor] = {}
    for key, part in zip(rates, units.split([r.shape[0] for r in rates.values()]), strict=True):
        ones, most = torch.ones_like(means[key][0]), torch.full_like(means[key][0], float(costs[key].max_bits))
        rows = [
            ideal_bits(v, ones, 0 * ones, most, float(n) * unit) if n else 0 * ones
            for v, n in zip(means[key], part.tolist(), strict=True)
        ]
        filled[key] = torch.stack(rows)
    return filled


def ideal_bits(
    variance: Float[Tensor, " m"],
    n: Float[Tensor, " m"],
    overhead: Float[Tensor, " m"],
    most: Float[Tensor, " m"],
    budget: float,
) -> Float[Tensor, " m"]:
    """Real-valued bits per coefficient of `m` groups of `n` coefficients, for `budget` bits with all overheads."""
    log_variance = variance.double().clamp_min(FLOOR).log2()
    low, high = float(log_variance.min()) - 2 * float(most.max()) - 2, float(log_variance.max())
    for _ in range(100):
        line = (low + high) / 2
        bits = _bits_above(log_variance, line, n, overhead, most)
        spent = float((n * bits + overhead * (bits > 0)).sum())
        low, high = (line, high) if spent > budget else (low, line)
    return _bits_above(log_variance, high, n, overhead, most)


def _bits_above(log_variance: Tensor, line: float, n: Tensor, overhead: Tensor, most: Tensor) -> Tensor:
    bits = ((log_variance - line) / 2).clamp_min(0).minimum(most)
    saved = (log_variance - line).exp2() - (log_variance - line - 2 * bits).exp2()
    pays = n * saved > 2 * math.log(2) * (n * bits + overhead)
    return torch.where(pays, bits, 0.0)


def _whole(ideal: Tensor, n: Tensor, overhead: Tensor, most: Tensor, budget: float) -> Tensor:
    kept = ideal > 0
    if not bool(kept.any()):
        raise ValueError(
            f"a budget of {budget:.0f} bits per token is too small for a single group of {int(n.max())} coefficients; "
            "use more bits or a smaller group"
        )
    unit = float(n[kept].max())
    total = math.floor((budget - float(overhead[kept].sum())) / unit)
    whole = torch.zeros_like(ideal)
    ceiling = int(most.max())
    whole[kept] = to_integers(ideal[kept], min(total, ceiling * int(kept.sum())), ceiling).double()
    return whole


def _at_least(bits: Tensor, variance: Tensor, least: Tensor, n: Tensor, overhead: Tensor, most: Tensor) -> Tensor:
    """Widths with none between zero and `least`, for no more bits.

    The weakest of the groups that lie between gives its bits up, the strongest rises to `least`, until none is left;
    what remains goes, a bit at a time, to the kept group with the largest error.
    """
    bits, spare = bits.clone(), 0.0
    between = [i for i in variance.argsort(descending=True, stable=True).tolist() if 0 < bits[i] < least[i]]
    while between:
        rise = float((least - bits)[between[0]] * n[between[0]])
        if rise <= spare:
            i = between.pop(0)
            spare -= rise
            bits[i] = least[i]
        else:
            i = between.pop()
            spare += float(n[i] * bits[i] + overhead[i])
            bits[i] = 0
    while True:
        room = (bits > 0) & (bits < most) & (n <= spare)
        if not bool(room.any()):
            return bits
        i = int(torch.where(room, variance.log2() - 2 * bits, -torch.inf).argmax())
        bits[i] += 1
        spare -= float(n[i])


def _geometric_mean(spectrum: Tensor, group: int) -> Tensor:
    return spectrum.double().clamp_min(FLOOR).unflatten(-1, (-1, group)).log().mean(-1).exp()
