"""Tokens of abnormally small norm act as attention sinks wherever they stand; they stay exact.

    token n is kept exact where ‖x_n‖ < fraction · rms ‖x‖,   x all heads of one side

Source: massive activations (arXiv:2402.17762); outlier tokens tracing, OTT (arXiv:2505.10938), which looks at keys.
Here:   one rule for keys or values with a threshold fixed by calibration, so a token's place depends on it alone.
"""

from dataclasses import dataclass
from typing import Literal, final

from jaxtyping import Bool, Float
from torch import Tensor


@final
@dataclass(frozen=True)
class SmallNorm:
    """Which tokens: those whose vector of `slot` is shorter than `fraction` of the usual length."""

    slot: Literal["key", "value"] = "value"
    fraction: float = 0.38

    def __post_init__(self) -> None:
        if self.slot not in ("key", "value"):
            raise ValueError(f"unknown slot {self.slot!r}; known: key, value")
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction={self.fraction} of the usual norm is not between 0 and 1")

    def fit(self, rms_norm: float) -> "NormBelow":
        """The rule of one layer, from the usual norm of its vectors."""
        return NormBelow(self.slot, self.fraction * rms_norm)


@final
@dataclass(frozen=True)
class NormBelow:
    """The fitted rule of one layer."""

    slot: Literal["key", "value"]
    threshold: float

    def exact(self, key: Float[Tensor, "b h t d"], value: Float[Tensor, "b h t e"]) -> Bool[Tensor, "b t"]:
        """True where a token is to be kept exact."""
        x = key if self.slot == "key" else value
        return token_norms(x) < self.threshold


def token_norms(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b t"]:
    """Length of each token's vector over all heads, float64."""
    return x.double().square().sum((1, 3)).sqrt()
