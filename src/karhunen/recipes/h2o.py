"""H2O (arXiv:2306.14048): heavy hitters by accumulated attention, and the newest tokens; the others are dropped.

Reproduced: attention summed over all queries since the first, head by head; half the budget for heavy hitters, half
for recent tokens, 20 % of the tokens together; decided again while tokens come. Departs: a budget is a share of the
tokens seen so far, not of the prompt; pages of 16 tokens are chosen from at a time; the query heads of a group are
averaged. The sums take four bytes per token and head held, and are counted.
"""

from karhunen.recipe import Recipe
from karhunen.windows.accumulated_attention import AccumulatedAttention
from karhunen.windows.budget import Share
from karhunen.windows.top_scored import TopScored

RATES = {4: {"kept": 0.25, "recent": 0.125}, 8: {"kept": 0.12, "recent": 0.06}, 12: {"kept": 0.078, "recent": 0.039}}


def h2o(kept: float = 0.2, recent: float = 0.1) -> Recipe:
    """A share `kept` of the tokens stays, the share `recent` of newest ones among them."""
    window = TopScored(AccumulatedAttention(), Share(kept), Share(recent), again=True)
    return Recipe("h2o", key=None, value=None, window=window)
