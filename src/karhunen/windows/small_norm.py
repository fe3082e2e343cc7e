"""Tokens of abnormally small norm act as attention sinks wherever they stand; they stay exact.

    token n is kept exact where ‖x_n‖ < fraction · rms ‖x‖,   x all heads of one side
    steady: of each group of tokens that leave together, the shortest, so that after n tokens −2 ≤ kept − share · n ≤ 8

Source: massive activations (arXiv:2402.17762); outlier tokens tracing, OTT (arXiv:2505.10938), which looks at keys.
Here:   one rule for keys or values with a threshold fixed by calibration. Texts differ in how many such tokens they
        hold, by five times and more; a steady rule spends what the budget set aside for them, no more and no less.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.device import HOST, computes_float64

TOKENS_ABOVE = 8  # a text's abnormal tokens come in runs; over 2,000 tokens this is 0.4 % of them
TOKENS_BELOW = 2  # many texts stay there


@final
@dataclass(frozen=True)
class SmallNorm:
    """Which tokens: those whose vector of `slot` is shorter than `fraction` of the usual length. `steady`: as many of a
    text as the budget has set aside, the shortest first."""

    slot: Literal["key", "value"] = "value"
    fraction: float = 0.38
    steady: bool = False

    def __post_init__(self) -> None:
        if self.slot not in ("key", "value"):
            raise ValueError(f"unknown slot {self.slot!r}; known: key, value")
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction={self.fraction} of the usual norm is not between 0 and 1")

    def fit(self, rms_norm: float, share: float) -> "NormBelow":
        """The rule of one layer, from the usual norm of its vectors and the share of tokens the budget pays for."""
        return NormBelow(self.slot, self.fraction * rms_norm, share if self.steady else None)


@final
@dataclass(frozen=True)
class NormBelow:
    """The fitted rule of one layer; without a `share` every short token is kept."""

    slot: Literal["key", "value"]
    threshold: float
    share: float | None = None

    def __post_init__(self) -> None:
        if self.threshold < 0 or (self.share is not None and self.share < 0):
            raise ValueError(f"threshold={self.threshold} and share={self.share} are not 0 or more")

    def exchanged(self) -> "NormBelow":
        """The rule of the other slot."""
        return replace(self, slot="value" if self.slot == "key" else "key")

    def exact(
        self,
        key: Float[Tensor, "b h t d"],
        value: Float[Tensor, "b h t e"],
        group_tokens: int,
        n_before: int = 0,
        kept_before: Int[Tensor, " b"] | None = None,
        padding: Bool[Tensor, "b t"] | None = None,
    ) -> Bool[Tensor, "b t"]:
        """`named` of these vectors, on the host: waits for the device they lie on."""
        return self.named(self.norms(key, value).to(HOST), group_tokens, n_before, kept_before, padding)

    def norms(self, key: Float[Tensor, "b h t d"], value: Float[Tensor, "b h t e"]) -> Float[Tensor, "b t"]:
        """What the rule looks at."""
        return token_norms(key if self.slot == "key" else value)

    def named(
        self,
        norms: Float[Tensor, "b t"],
        group_tokens: int,
        n_before: int = 0,
        kept_before: Int[Tensor, " b"] | None = None,
        padding: Bool[Tensor, "b t"] | None = None,
    ) -> Bool[Tensor, "b t"]:
        """True where a token is to be kept exact. Tokens are decided on in groups of `group_tokens`, counted from the
        first coded one: after what ends a group that a crop has cut, `t` is a multiple of it. `n_before` tokens were
        decided on earlier, of which each row kept `kept_before`; what a share has set aside is not spent on `padding`.
        All on the host."""
        if self.share is None:
            return norms < self.threshold
        if padding is not None:
            norms = norms.masked_fill(padding, math.inf)
        kept = torch.zeros(len(norms), dtype=torch.int64, device=HOST) if kept_before is None else kept_before
        lead = min(-n_before % group_tokens, norms.shape[1])  # of a group that a crop has cut
        first = self._named(norms[:, :lead], max(lead, 1), n_before, kept)
        return torch.cat([first, self._named(norms[:, lead:], group_tokens, n_before + lead, kept + first.sum(1))], 1)

    def _named(
        self, norms: Float[Tensor, "b t"], group_tokens: int, n_before: int, kept_before: Int[Tensor, " b"]
    ) -> Bool[Tensor, "b t"]:
        if not norms.shape[1]:
            return torch.zeros_like(norms, dtype=torch.bool)
        groups = norms.float().unflatten(1, (-1, group_tokens))  # float32: equal tokens have equal norms in any batch
        n_short = (groups < self.threshold).sum(2).tolist()
        n_exact = [
            self._n_exact(row, group_tokens, n_before, n) for row, n in zip(n_short, kept_before.tolist(), strict=True)
        ]
        rank = groups.argsort(dim=2, stable=True).argsort(dim=2)
        return (rank < torch.tensor(n_exact, device=HOST)[:, :, None]).flatten(1)

    def _n_exact(self, n_short: list[int], group_tokens: int, n_before: int, kept: int) -> list[int]:
        """How many of each group: its short ones as far as the share allows, more where fewer were kept than that."""
        assert self.share is not None, "only a steady rule counts"
        found: list[int] = []
        for i, n in enumerate(n_short):
            due = self.share * (n_before + (i + 1) * group_tokens)
            least, most = math.ceil(due - TOKENS_BELOW) - kept, math.floor(due + TOKENS_ABOVE) - kept
            found.append(min(max(n, least), max(most, 0), group_tokens))
            kept += found[-1]
        return found


def token_norms(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b t"]:
    """Length of each token's vector over all heads, float64."""
    x = x if computes_float64(x.device) else x.to(HOST)
    return x.double().square().sum((1, 3)).sqrt()
