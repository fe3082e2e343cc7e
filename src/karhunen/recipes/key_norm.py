"""Key norms (Devoto et al., arXiv:2406.11430): keys of large norm are dropped, head by head; no query is looked at.

Reproduced: the keys of lowest L2 norm stay, whatever their age, as a share of the tokens seen; chosen again while
tokens come. Departs: every layer is compressed (the authors' code may spare the first two); pages of 16 tokens are
chosen from at a time.
"""

from karhunen.recipe import Recipe
from karhunen.windows.budget import Share, Tokens
from karhunen.windows.key_norm import KeyNorm
from karhunen.windows.top_scored import TopScored

# by norm alone SmolLM2 loses what it has just read; with sinks and recent tokens the KL is a fourteenth at 4×
RATES = {
    4: {"kept": 0.245, "recent": 64, "sink": 4},
    8: {"kept": 0.12, "recent": 64, "sink": 4},
    12: {"kept": 0.078, "recent": 64, "sink": 4},
}


def key_norm(kept: float = 0.5, recent: int = 0, sink: int = 0) -> Recipe:
    """A share `kept` of the tokens stays; of those, the `recent` newest whatever their norm, besides `sink` first."""
    window = TopScored(KeyNorm(), Share(kept), Tokens(recent), sink, again=True)
    return Recipe("key_norm", key=None, value=None, window=window)
