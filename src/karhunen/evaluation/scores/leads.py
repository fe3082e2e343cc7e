"""How near a model is to saying something else: the lead of every token of a text that it is given.

    lead_i = log p(token_i) − max over the other tokens of log p,    above 0 where greedy decoding chooses the token

All leads above 0: greedy decoding says the text. It is read in few forwards in place of a step for each token, each as
long as no token leaves the window of a compressed cache, so that its tokens read what they would read one by one.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument, inference
from karhunen.windows.partition import Place


def leads(
    model: nn.Module, cache: Any, before: Float[Tensor, " v"], tokens: Int[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
    """The leads in nats, and the likeliest token of each place; `before` are the logits of the first. `cache` has read
    what comes before the text, and reads all of it but the last token."""
    device = next(model.parameters()).device
    settings: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    rows, at, n = [before[None].to(device)], 0, len(tokens) - 1
    with inference(model):
        while at < n:
            chunk = tokens[at : at + _n_alike(cache, n - at)]
            rows.append(cast("Any", model)(input_ids=chunk[None].to(device), **settings).logits[0])
            at += len(chunk)
    logits = torch.cat(rows).float().cpu()
    return leads_of(logits, tokens), logits.argmax(-1)


def leads_of(logits: Float[Tensor, "n v"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Of these tokens over the likeliest others."""
    at = tokens[:, None]
    return (logits.gather(-1, at) - logits.scatter(-1, at, -torch.inf).amax(-1, keepdim=True)).squeeze(-1)


def _n_alike(cache: Any, n_most: int) -> int:
    """How many tokens may be read at once without one that should leave the window staying in it."""
    if not isinstance(cache, CompressedCache):
        return n_most
    window, n_held = cache.codec.window, cache.get_seq_length()
    granules = {layer.granule_tokens for layer in cache.codec.layers.values()}

    def left(n_tokens: int) -> list[int]:
        parts = [window.partition(n_tokens, granule) for granule in granules]
        return [part.count(place) for part in parts for place in (Place.CODED, Place.DROPPED)]

    now = left(n_held)
    return next((n for n in range(1, n_most) if left(n_held + n) != now), n_most)
