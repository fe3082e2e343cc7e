"""StreamingLLM (arXiv:2309.17453): attention sinks and the newest tokens, exact; everything else is dropped.

Reproduced: 4 sinks, a window of 1,020 more. Departs: tokens keep their own positions where the paper counts positions
within the cache, so the context is bounded by the model's own; pages of 16 tokens leave at a time.
"""

from karhunen.recipe import Recipe
from karhunen.windows.streaming import Streaming

RATES = {4: {"kept": 556}, 8: {"kept": 276}, 12: {"kept": 180}}  # of a context of 2,240 tokens


def streaming_llm(sink: int = 4, kept: int = 1020) -> Recipe:
    """`sink` first and `kept` newest tokens; nothing is coded, so the rate is the context's length over their sum."""
    return Recipe("streaming_llm", key=None, value=None, window=Streaming(sink, kept))
