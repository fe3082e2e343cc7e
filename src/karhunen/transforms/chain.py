"""Several transforms one after the other."""

from dataclasses import dataclass
from functools import reduce
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import Transform, TransformData, TransformSpec


@final
@dataclass(frozen=True)
class ChainSpec(TransformSpec):
    """Parts applied left to right; each is fitted to what the parts before it give."""

    parts: tuple[TransformSpec, ...]

    @property
    def needs_moments(self) -> bool:  # type: ignore[override]
        """Whether any part does."""
        return any(part.needs_moments for part in self.parts)

    def needs(self, about: Need) -> frozenset[Need]:
        """Those of the first part; statistics in the frame say nothing of the coordinates after it."""
        return self.parts[0].needs(about) if self.parts else frozenset()

    def fit(self, data: TransformData) -> "Chain":
        """The parts, fitted in order. Only the first sees metric and statistics: after it the coordinates carry the
        cost."""
        fitted: list[Transform] = []
        for part in self.parts:
            fitted.append(part.fit(data))
            moments = transformed_moments(data.moments, fitted[-1])
            data = TransformData(data.g, data.d, moments, n_heads=data.n_heads)
        return Chain(tuple(fitted))


@final
@dataclass(frozen=True)
class Chain(Transform):
    """Fitted transforms, one after the other."""

    parts: tuple[Transform, ...]

    def n_coefficients(self, g: int, d: int) -> int:
        """Of the last part, each fitting what the one before makes."""
        return reduce(lambda size, part: part.n_coefficients(g, size), self.parts, d)

    def forward(self, x: Float[Tensor, "*b g t d"]) -> Float[Tensor, "*b g t c"]:
        """Each part in turn, from left to right."""
        return reduce(lambda y, part: part.forward(y), self.parts, x)

    def inverse(self, y: Float[Tensor, "*b g t c"]) -> Float[Tensor, "*b g t d"]:
        """The mirror of `forward`: each part undone, from right to left."""
        return reduce(lambda x, part: part.inverse(x), reversed(self.parts), y)


def transformed_moments(moments: Moments | None, transform: Transform) -> Moments | None:
    """Moments of the coefficients, from the moments of the vectors; exact for affine transforms."""
    if moments is None or not isinstance(transform, AffineMap | Chain):
        return moments
    if isinstance(transform, Chain):
        return reduce(transformed_moments, transform.parts, moments)
    matrix, mean = transform.matrix.double(), transform.mean.double()
    count = moments.count[:, None]
    centered_sum = moments.sum - count * mean
    cross = moments.sum[:, :, None] * mean[:, None, :]
    centered_outer = moments.outer - cross - cross.mT + count[..., None] * mean[:, :, None] * mean[:, None, :]
    return Moments(
        moments.count,
        (centered_sum[:, None] @ matrix).squeeze(1),
        matrix.mT @ centered_outer @ matrix,
    )
