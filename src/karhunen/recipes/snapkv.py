"""SnapKV (arXiv:2404.14469): the prompt's last queries vote on whom to keep, head by head; decided once.

Reproduced: an observation window of 32 queries, which stays; votes pooled over 7 neighbours by their maximum; 1,024
tokens kept of the prompt, window included; all that comes later stays. Departs: query heads of a group are averaged
and share what they keep (the paper's code repeats keys first, which saves no bytes under grouped queries).
"""

from typing import Literal

from karhunen.recipe import Recipe
from karhunen.windows.budget import Tokens
from karhunen.windows.observed_attention import ObservedAttention
from karhunen.windows.top_scored import TopScored

RATES = {4: {"kept": 368}, 8: {"kept": 88}}  # of 2,048 tokens of prompt and 192 more, which stay


def snapkv(kept: int = 1024, recent: int = 32, kernel: int = 7, pooling: Literal["max", "mean"] = "max") -> Recipe:
    """`kept` tokens of the prompt stay, the `recent` newest, whose queries vote, among them."""
    window = TopScored(ObservedAttention(recent, kernel, pooling), Tokens(kept), Tokens(recent))
    return Recipe("snapkv", key=None, value=None, window=window)
