"""Which tokens of a page stay exact: the sinks of the window where the page begins a text, and those a rule names.

A page has room for one token in 16 by the rule, so that its size is bounded; the shortest vectors come first.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from karhunen.windows.small_norm import NormBelow, token_norms

EXACT_SHARE, EXACT_FLOOR = 16, 4  # a page keeps one token in 16 exact by the codec's rule, or 4 if that is more


def most_exact(n_tokens: int) -> int:
    """By the rule, of a page of `n_tokens`."""
    return min(n_tokens, max(EXACT_FLOOR, n_tokens // EXACT_SHARE))


def shortest(rule: NormBelow, given: tuple[Tensor, Tensor], page_tokens: int) -> Bool[Tensor, " t"]:
    """Whom the rule names; of a page with more than its share, those of smallest norm."""
    key, value = (x[None] for x in given)
    norms = token_norms(key if rule.slot == "key" else value)[0].float().cpu()
    named = norms < rule.threshold  # a page stands alone: what a text has used up of a steady rule's share is not known
    for start in range(0, len(named), page_tokens):
        page = named[start : start + page_tokens]
        most = most_exact(len(page))
        if int(page.sum()) > most:
            order = torch.where(page, norms[start : start + page_tokens], torch.inf).argsort(stable=True)
            page.zero_()[order[:most]] = True
    return named
