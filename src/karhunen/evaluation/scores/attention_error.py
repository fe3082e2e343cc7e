"""What coding does to one layer's attention alone, its queries being the exact ones.

    p = softmax(q Kᵀ),  p̂ = softmax(q K̂ᵀ):    attention KL = Σ p log(p / p̂),    output error = |p̂V̂ − pV|² / |pV|²

K̂ and V̂ are read from the layer's own store, so sinks, recent tokens and exceptions are exact as in use. Asked are the
newest queries of a document. Unlike logit KL, this does not mix the layers: it says where an error begins. Where a
window drops tokens the KL is infinite; then only the output error is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.hf.capture import Attention, Observation, capturing
from karhunen.kernels.softmax import capped, causal, log_attention_weights
from karhunen.store.layer_store import LayerStore
from karhunen.windows.top_scored import TopScored

N_QUERIES = 64


@final
@dataclass(frozen=True)
class Captured:
    """One layer on one document: what it caches, and its newest queries."""

    key: Float[Tensor, "b h t d"]
    value: Float[Tensor, "b h t e"]
    query: Float[Tensor, "b q m d"]
    scale: float
    window_tokens: int | None
    softcap: float | None
    sinks: Float[Tensor, " q"] | None


@final
@dataclass(frozen=True)
class LayerError:
    """Means over heads and queries, in nats and as a share of the output's energy."""

    layer: int
    attention_kl: float | None
    output_error: float


def capture(model: nn.Module, tokens: Int[Tensor, " n"], n_queries: int = N_QUERIES) -> dict[int, Captured]:
    """One forward; layers whose attention is not seen are absent."""
    found: dict[int, Captured] = {}

    def listen(seen: Observation) -> None:
        if seen.attention is not None:
            found[seen.layer] = _captured(seen, seen.attention, n_queries)

    with capturing(model, listen) as run:
        run(tokens[None], None)
    return found


def attention_errors(codec: Codec, captured: Mapping[int, Captured]) -> list[LayerError]:
    """Errors of every coded layer that was captured; none where a score chooses tokens, since no index then says which
    queries see whom, nor where the bytes of a token depend on queries."""
    if isinstance(codec.window, TopScored) or codec.window.reads != "never":
        return []
    return [_error(i, codec, captured[i]) for i in sorted(codec.layers) if i in captured]


def _captured(seen: Observation, attention: Attention, n_queries: int) -> Captured:
    return Captured(
        seen.key.detach().clone(),
        seen.value.detach().clone(),
        attention.query[:, :, -n_queries:].detach().clone(),
        attention.scale,
        attention.window_tokens,
        attention.softcap,
        attention.sinks,
    )


@torch.no_grad()
def _error(layer: int, codec: Codec, seen: Captured) -> LayerError:
    store = LayerStore(codec.layers[layer], codec.window)
    store.append(seen.key, seen.value)
    key, value = store.read()
    t, n_dropped = seen.key.shape[2], seen.key.shape[2] - key.shape[2]
    n_sink = min(codec.window.sink_tokens, t)
    every = torch.arange(t, device=key.device)
    held = torch.cat([every[:n_sink], every[n_sink + n_dropped :]])
    p, q = _log_weights(seen, seen.key, every), _log_weights(seen, key, held)
    exact, coded = _output(p, seen.value), _output(q, value)
    kl = None
    if not n_dropped:
        kl = float(torch.where(p.exp() > 0, p.exp() * (p - q), 0).sum(-1).mean().clamp_min(0))
    error = (coded - exact).square().sum() / exact.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    return LayerError(layer, kl, float(error))


def _log_weights(seen: Captured, key: Tensor, held: Int[Tensor, " t"]) -> Float[Tensor, "b q m t"]:
    """Of the keys that stand at the indices `held`."""
    repeated = key.repeat_interleave(seen.query.shape[1] // key.shape[1], dim=1).float()
    scores = capped(seen.query.float() @ repeated.transpose(-1, -2) * seen.scale, seen.softcap)
    n, m = seen.key.shape[2], seen.query.shape[2]
    visible = causal(torch.arange(n - m, n, device=held.device), held, seen.window_tokens)
    scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    return log_attention_weights(scores, None if seen.sinks is None else seen.sinks[:, None])


def _output(log_weights: Tensor, value: Tensor) -> Float[Tensor, "b q m e"]:
    return log_weights.exp() @ value.repeat_interleave(log_weights.shape[1] // value.shape[1], dim=1).float()
