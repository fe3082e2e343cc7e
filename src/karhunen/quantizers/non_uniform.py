"""Points where the values are: one table of 2^w levels for a layer's side, each vector's strongest outliers kept apart.

    z = (y − centre) / scale,   symbol = nearest of the levels,   ŷ = centre + scale · level;   outliers: (index, value)

Source: KVQuant (arXiv:2401.18079) §3.3 (levels by k-means on calibration data), §3.4 (1 % of a vector's elements
sparse).
`channel`: centre and scale of each coefficient are calibrated, from the values inside its outer quantiles (keys).
`token`: they are each token's own, of its values that are no outliers (values).
Here:   scale is the spread about the centre for tokens, half the inlier range for channels; k-means weighs a value
        with scale², so its error counts in the side's metric; a token has a fixed number of outliers, so its bytes
        are fixed.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec, as_half
from karhunen.quantizers.kmeans import kmeans
from karhunen.values import refuse_unless_one_of

OUTLIER_BITS = 32  # a 16-bit index and a float16 value
LARGEST_VECTOR = 1 << 15  # coefficients an index can name
MAX_BITS = 8


@final
@dataclass(frozen=True)
class NonUniform(QuantizerSpec):
    """`outlier_share` of a token's coefficients, at least one unless 0, are stored as they are."""

    ranges: Literal["channel", "token"] = "token"
    outlier_share: float = 0.01
    n_iterations: int = 20
    max_values: int = 32768
    seed: int = 0
    needs_samples = True

    def __post_init__(self) -> None:
        refuse_unless_one_of("ranges", self.ranges, ("channel", "token"))
        if not 0 <= self.outlier_share < 0.5:
            raise ValueError(f"outlier_share={self.outlier_share} is not a small share; use 0 <= outlier_share < 0.5")

    def cost(self, c: int) -> RateCost:
        """One width for all; a centre and a scale per token where they are its own."""
        return RateCost(token_bits=(32 if self.ranges == "token" else 0) + OUTLIER_BITS * self.outlier_share * c)

    def fit(self, data: QuantizerData) -> "NonUniformQuantizer":
        """ValueError unless every rate is the same."""
        g, c = data.rates.shape
        bits = int(data.rates.max().round())
        if bool((data.rates != bits).any()) or not 1 <= bits <= MAX_BITS:
            raise ValueError(f"one table needs one width of 1 to {MAX_BITS} bits for all coefficients; use Uniform")
        if g * c > LARGEST_VECTOR:
            raise ValueError(f"{g * c} coefficients of a token are more than the {LARGEST_VECTOR} an index can name")
        y = data.require_samples().double()
        n_outliers = max(1, round(self.outlier_share * g * c)) if self.outlier_share else 0
        centre, scale = torch.zeros(g, c, device=y.device), torch.ones(g, c, device=y.device)
        if self.ranges == "channel":
            ends = torch.tensor([self.outlier_share / 2, 1 - self.outlier_share / 2], dtype=y.dtype, device=y.device)
            low, high = y.quantile(ends, dim=1)
            centre, scale = ((low + high) / 2).float(), ((high - low) / 2).clamp_min(1e-30).float()
        draft = NonUniformQuantizer(centre.new_zeros(2**bits), centre, scale, n_outliers, self.ranges == "token")
        return NonUniformQuantizer(self._levels(draft, y, bits), centre, scale, n_outliers, self.ranges == "token")

    def _levels(self, draft: "NonUniformQuantizer", y: Float[Tensor, "g n c"], bits: int) -> Float[Tensor, " levels"]:
        z, scale, inlier = draft.normalized(y[None])
        z, weight = z[inlier], scale.expand_as(z)[inlier].square()
        step = max(1, -(-z.numel() // self.max_values))
        z, weight = z[::step], weight[::step] / weight.mean().clamp_min(1e-30)
        levels = kmeans(z[None, :, None], 2**bits, self.n_iterations, self.seed, weight[None])
        return levels.flatten().sort().values


@final
@dataclass(frozen=True)
class NonUniformQuantizer(Quantizer):
    """Sorted `levels` for all; `centre` and `scale` by channel, or each token's own where `by_token`."""

    levels: Float[Tensor, " levels"]
    centre: Float[Tensor, "g c"]
    scale: Float[Tensor, "g c"]
    n_outliers: int
    by_token: bool

    @property
    def widths(self) -> tuple[int, ...]:
        """The same for every coefficient."""
        return ((len(self.levels) - 1).bit_length(),) * self.centre.numel()

    def check(self, g: int, c: int) -> None:
        """A level for each symbol, in order; a centre and a scale above 0 for each coefficient."""
        n = len(self.levels)
        if n < 2 or n & (n - 1) or n > 2**MAX_BITS or bool((self.levels.diff() < 0).any()):
            raise ValueError(f"{n} levels are not 2 to {2**MAX_BITS} of a power of two, in order")
        if (self.centre.shape, self.scale.shape) != ((g, c), (g, c)) or not bool((self.scale > 0).all()):
            raise ValueError(f"centres {tuple(self.centre.shape)} and scales are not those of {g} groups of {c}")
        if not 0 <= self.n_outliers <= g * c <= LARGEST_VECTOR:
            raise ValueError(f"{self.n_outliers} outliers of {g * c} coefficients")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `outlier_at`, `outlier` [b n t]; `centre`, `scale` [b g t] where they are by token."""
        y = y.double()
        at = self._outliers_of(y)
        values = _rows(y).gather(1, at)
        side: dict[str, Tensor] = {"outlier_at": at.to(torch.int16), "outlier": as_half(values)}
        centre, scale = self._ranges(y, self._inlier(y, at))
        if self.by_token:
            centre, scale = as_half(centre), as_half(scale)
            side |= {"centre": centre[..., 0], "scale": scale[..., 0]}
        z = (y - centre.double()) / torch.where(scale > 0, scale, 1.0).double()
        levels = self.levels.double()
        symbols = torch.bucketize(_rows(z).contiguous(), (levels[1:] + levels[:-1]) / 2).int()
        return Codes(symbols, side)

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        z = self.levels[codes.symbols.long()].unflatten(1, self.centre.shape).transpose(-2, -1)
        centre, scale = self.centre[:, None], self.scale[:, None]
        if self.by_token:
            centre, scale = (codes.side[name].float()[..., None] for name in ("centre", "scale"))
        rows = _rows(centre + scale * z)
        rows = rows.scatter(1, codes.side["outlier_at"].long(), codes.side["outlier"].float())
        return rows.unflatten(1, self.centre.shape).transpose(-2, -1)

    def normalized(self, y: Float[Tensor, "b g t c"]) -> tuple[Tensor, Tensor, Tensor]:
        """z, the scale, and which of the coefficients are no outliers."""
        inlier = self._inlier(y, self._outliers_of(y))
        centre, scale = self._ranges(y, inlier)
        return (y - centre) / torch.where(scale > 0, scale, 1.0), scale, inlier

    def _outliers_of(self, y: Float[Tensor, "b g t c"]) -> Int[Tensor, "b n t"]:
        """The coefficients of a token that lie furthest out, over all its heads; lowest index first."""
        far = y if self.by_token else (y - self.centre[:, None].double()) / self.scale[:, None].double()
        order = _rows(far.abs()).sort(dim=1, descending=True, stable=True).indices
        return order[:, : self.n_outliers].sort(dim=1).values

    def _inlier(self, y: Tensor, at: Tensor) -> Tensor:
        rows = torch.ones_like(_rows(y), dtype=torch.bool).scatter(1, at, value=False)
        return rows.unflatten(1, self.centre.shape).transpose(-2, -1)

    def _ranges(self, y: Tensor, inlier: Tensor) -> tuple[Tensor, Tensor]:
        if not self.by_token:
            return self.centre[:, None].double(), self.scale[:, None].double()
        n = inlier.sum(-1, keepdim=True).clamp_min(1)
        centre = (y * inlier).sum(-1, keepdim=True) / n
        return centre, (((y - centre) * inlier).square().sum(-1, keepdim=True) / n).sqrt()


def _rows(y: Float[Tensor, "b g t c"]) -> Float[Tensor, "b s t"]:
    return y.transpose(-2, -1).flatten(1, 2)
