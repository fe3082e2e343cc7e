"""Which tokens a rank keeps exact: a token's length is over all heads, and a rank has some, so it takes its share."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from karhunen.pages import PageCodec
from karhunen.pages.exact import shortest
from karhunen.pages.plan import KeysValues


def own_exact(pages: PageCodec, vectors: Mapping[int, KeysValues], page_tokens: int) -> dict[int, Tensor] | None:
    """By layer, for `PageCodec.encode_pages` of a shard; None where there is one shard and so all heads.

    A token is kept where the length of its own heads is below their share of the rule's threshold, as if the heads were
    equally long. Ranks may differ about a token; each page says which it holds.
    """
    n_parts = pages.shard[1]
    if n_parts == 1:
        return None
    found: dict[int, Tensor] = {}
    for layer, given in vectors.items():
        codec = pages.codec.layers.get(layer)
        if codec is not None and codec.exceptions is not None:
            rule = replace(codec.exceptions, threshold=codec.exceptions.threshold / n_parts**0.5)
            found[layer] = shortest(rule, given, page_tokens)
    return found
