"""One softmax for all attention here: scores capped, tokens hidden, learned sinks, and parts merged by their sums.

    s_n   = cap(scale · qᵀ k_n),    cap(s) = c · tanh(s / c)             a hidden token has s_n = −∞
    a_n   = e^s_n / (Σ_m e^s_m + e^sink)                                 a sink takes its share and gives nothing
    part  = (Σ_n a_n v_n, log Σ_n e^s_n), without sinks;                 disjoint parts add up by their sums

Tensors of torch, in their own dtype: the definition that kernels are tested against, and what is read seldom.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

INVISIBLE = -1e30
"""A mask entry at or below this hides its token; transformers writes the least finite float, others -inf."""


@final
@dataclass(frozen=True)
class Partial:
    """Attention over some of the tokens: the mean under that softmax, and the logarithm of its denominator.

    A row that sees no token has mean 0 and `log_sum` -inf.
    """

    mean: Float[Tensor, "*rows c"]
    log_sum: Float[Tensor, "*rows"]


def capped(scores: Float[Tensor, "*rows n"], softcap: float | None) -> Float[Tensor, "*rows n"]:
    """The scores where there is no cap (None or 0)."""
    return softcap * (scores / softcap).tanh() if softcap else scores


def causal(
    rows: Int[Tensor, " r"], columns: Int[Tensor, " n"], window_tokens: int | None = None
) -> Bool[Tensor, "r n"]:
    """Whether the token at each index sees the one at each other: itself and earlier ones, of a window its newest."""
    age = rows[:, None] - columns
    return (age >= 0) & (age < window_tokens) if window_tokens else age >= 0


def attention_weights(
    scores: Float[Tensor, "*rows n"], sinks: Float[Tensor, "*#rows"] | None = None
) -> Float[Tensor, "*rows n"]:
    """a_n; every row sees a token. `sinks` are logits that broadcast against the rows."""
    return scores.softmax(-1) if sinks is None else _beside(scores, sinks).softmax(-1)[..., :-1]


def log_attention_weights(
    scores: Float[Tensor, "*rows n"], sinks: Float[Tensor, "*#rows"] | None = None
) -> Float[Tensor, "*rows n"]:
    """log a_n, as `attention_weights`."""
    return scores.log_softmax(-1) if sinks is None else _beside(scores, sinks).log_softmax(-1)[..., :-1]


def attended(scores: Float[Tensor, "*rows n"], values: Float[Tensor, "*#rest n c"]) -> Partial:
    """The part of these tokens, if there are any; a row may see none."""
    if not scores.shape[-1]:
        mean = scores @ values
        return Partial(mean, torch.full_like(mean[..., 0], -torch.inf))
    largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    shares = (scores - largest).exp_()
    total = shares.sum(-1, keepdim=True)
    mean = (shares @ values) / total.clamp_min(torch.finfo(scores.dtype).tiny)
    return Partial(mean, (largest + total.log()).squeeze(-1))


def merge_partials(parts: Sequence[Partial]) -> Partial:
    """The part of the union of disjoint sets of tokens; all means in the same coordinates."""
    log_sums = torch.stack([part.log_sum for part in parts])
    total = log_sums.logsumexp(0)
    shares = (log_sums - total.clamp_min(torch.finfo(total.dtype).min)).exp()
    return Partial((shares[..., None] * torch.stack([part.mean for part in parts])).sum(0), total)


def with_sinks(part: Partial, sinks: Float[Tensor, "*#rows"] | None) -> Partial:
    """What is left of the mean when sinks take their share; the sum has them too."""
    if sinks is None:
        return part
    sinks = sinks.to(part.log_sum.dtype)
    share = torch.sigmoid(part.log_sum - sinks)
    return Partial(part.mean * share[..., None], torch.logaddexp(part.log_sum, sinks))


def _beside(scores: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat([scores, sinks.to(scores.dtype)[..., None].expand(*scores.shape[:-1], 1)], dim=-1)
