"""Principal axes of the values as attention sees them.

    E of Vᵀ Sᵀ S V = Σ_m o_m o_mᵀ,   o_m = Σ_n a_mn v_n,   y = v E

Source: NOVA-KV (arXiv:2608.04074), the value rotation, whose shipped approximation weighs token n by k_n Σ_Q k_nᵀ.
Here: `outputs` is the formula, `received` drops its cross terms (a value's weight is Σ_m a_mn²), `scores` is the
approximation as shipped. All three are rotations: the squared error stays what it is.
"""

from dataclasses import dataclass, replace
from typing import Literal, final

import torch

from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec
from karhunen.transforms.klt import principal_axes
from karhunen.values import refuse_unless_one_of

SOURCES = ("outputs", "received", "scores")


@final
@dataclass(frozen=True)
class AttendedAxes(TransformSpec):
    """Rotation to the axes of attention-weighted values, largest first; no mean is taken away."""

    source: Literal["outputs", "received", "scores"] = "outputs"
    needs_moments = True

    def __post_init__(self) -> None:
        refuse_unless_one_of("source", self.source, SOURCES)

    def needs(self, about: Need) -> frozenset[Need]:
        """Moments of attention's outputs, or of values weighted by the attention they receive."""
        return frozenset({self._need(about)})

    def fit(self, data: TransformData) -> AffineMap:
        """Axes by decreasing weighted energy."""
        basis = principal_axes(data.require(self._need(data.about), Moments).second_moment)
        return AffineMap(
            basis.new_zeros(data.g, data.d, dtype=torch.float32),
            basis.float().contiguous(),
            basis.mT.float().contiguous(),
        )

    def _need(self, about: Need) -> Need:
        if about.slot != "value":
            raise ValueError("AttendedAxes are those of values; use the KLT for keys")
        plain = replace(about, block_tokens=None, stride=1)
        if self.source == "outputs":
            return replace(plain, kind="outputs", quiet_slot=None, quiet_fraction=0.0)
        return replace(plain, kind="attended", weighting="scores" if self.source == "scores" else "uniform")
