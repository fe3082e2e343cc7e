"""How far attention's outputs move when decoded keys and values take the place of exact ones.

    δ = √( Σ_q ‖ô_q − o_q‖² / Σ_q ‖o_q‖² ),   o_q = Σ_t softmax_t(s q·k_t) v_t,   ô_q the same of k̂ and v̂

Sums are over the heads of a layer and over queries, each of which sees the tokens up to its own bound. Where no queries
are at hand, as in a store of pages, keys stand in for them: `standing_in`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.softmax import attended, causal

KeysValues = tuple[Float[Tensor, "h t d"], Float[Tensor, "h t e"]]


def attention_accuracy_delta(
    queries: Float[Tensor, "h n d"],
    n_seen: Int[Tensor, " n"],
    exact: KeysValues,
    decoded: KeysValues,
    scale: float | None = None,
) -> float:
    """δ of one layer, 0 for no change. Query i, of each KV head, sees the first `n_seen[i]` tokens, at least one.

    Keys and queries are those that attention multiplies, so after RoPE. `scale`: of the scores; None: d^−½.
    """
    wanted = attention(queries, n_seen, exact, scale)
    moved = attention(queries, n_seen, decoded, scale) - wanted
    return float(moved.norm() / wanted.norm())


def attention(
    queries: Float[Tensor, "h n d"], n_seen: Int[Tensor, " n"], pair: KeysValues, scale: float | None = None
) -> Float[Tensor, "h n e"]:
    """Outputs, in float32."""
    keys, values = (x.float() for x in pair)
    if not len(n_seen) or int(n_seen.min()) < 1 or int(n_seen.max()) > keys.shape[1]:
        raise ValueError(f"n_seen={n_seen.tolist()} of {keys.shape[1]} tokens; each query sees at least one of them")
    scores = queries.float() @ keys.mT * (keys.shape[2] ** -0.5 if scale is None else scale)
    seen = causal(n_seen.to(keys.device) - 1, torch.arange(keys.shape[1], device=keys.device))
    return attended(scores.masked_fill(~seen, -torch.inf), values).mean


def standing_in(keys: Float[Tensor, "h t d"]) -> tuple[Float[Tensor, "h n d"], Int[Tensor, " n"]]:
    """(queries, n_seen): the keys of the second half of a run of tokens, each of which sees those before it.

    A key does not see itself, which it would look at alone. ValueError for less than two tokens.
    """
    n_tokens = keys.shape[1]
    if n_tokens < 2:
        raise ValueError(f"{n_tokens} tokens have no half that could ask the other; give two or more")
    return keys[:, n_tokens // 2 :], torch.arange(n_tokens // 2, n_tokens, device=keys.device)
