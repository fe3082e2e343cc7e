"""Drift: how much worse a codec's axes and plan are for today's vectors than those that would be fitted to them.

    y        coefficients in the codec's transform, in which squared error is the cost
    b_i      = max(0, ½ log2(λ_i / θ)),  Σ b_i = B     the plan: λ of calibration, B the bits of the head group's bytes
    D        = Σ_i E[y_i²] 2^(−2 b_i)                  today's vectors under that plan
    D*       = Σ_i min(θ*, λ*_i)                       the same bits on today's own axes; λ* eigenvalues of Cov[y] today
    drift    = D / D* ≥ 1

Both are the rate-distortion bounds of Gaussian vectors, so that what a quantizer loses above them cancels. Turning the
axes is orthogonal in y, so a codec's metric needs no second look: it stays as it was stored. Source: this project, from
reverse water-filling (Cover & Thomas, Theorem 10.3.3).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.statistics.moments import Moments

FLOOR = 1e-30  # a variance of zero gets no bits, and a ratio of two of them is 1


@final
@dataclass(frozen=True)
class Drift:
    """Expected costs of one token, by head group: under the plan in use, and at best."""

    used: Float[Tensor, " g"]
    best: Float[Tensor, " g"]

    @property
    def ratio(self) -> Float[Tensor, " g"]:
        """D / D*, 1 or more."""
        return (self.used + FLOOR) / (self.best + FLOOR)

    @staticmethod
    def together(parts: Iterable["Drift"]) -> float:
        """The same ratio of several layers and sides, whose costs are in one unit; 1 for none."""
        held = list(parts)
        used, best = (sum(float(getattr(part, name).sum()) for part in held) for name in ("used", "best"))
        return (used + FLOOR) / (best + FLOOR)


def drift_of(design: Float[Tensor, "g c"], now: Moments, bits: Float[Tensor, " g"]) -> Drift:
    """Of one side: `design` are the variances that the plan was made for, `now` today's moments of the coefficients."""
    rates = water_filled(design, bits)
    used = (now.second_moment.diagonal(dim1=-2, dim2=-1) * torch.exp2(-2 * rates)).sum(-1)
    own = torch.linalg.eigvalsh(now.covariance).clamp_min(0)
    best = (own * torch.exp2(-2 * water_filled(own, bits))).sum(-1)
    return Drift(used, best)


def water_filled(variance: Float[Tensor, "g c"], bits: Float[Tensor, " g"]) -> Float[Tensor, "g c"]:
    """b_i of each group, real numbers that sum to its bits.

    With the n largest above the water, log2 θ = (Σ_n log2 λ − 2B) / n; the right n is the largest whose smallest λ is
    still above it.
    """
    logs = variance.double().clamp_min(FLOOR).log2()
    ordered = logs.sort(-1, descending=True).values
    n = torch.arange(1, logs.shape[-1] + 1, dtype=logs.dtype, device=logs.device)
    water = (ordered.cumsum(-1) - 2 * bits.double()[:, None]) / n
    n_above = (ordered >= water).sum(-1).clamp_min(1)  # those that fit come first: the water falls while they do
    level = water.gather(-1, n_above[:, None] - 1)
    return ((logs - level) / 2).clamp_min(0)
