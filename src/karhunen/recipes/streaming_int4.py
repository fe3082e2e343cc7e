"""StreamingLLM's eviction (arXiv:2309.17453) with a window four times as long, in int4: exact, then coded, then gone.

Shows that eviction and quantization compose in one window. Departs from the paper as `streaming_llm` does.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.windows.streaming import Streaming


def streaming_int4(group: int = 64, sink: int = 4, recent: int = 128, coded: int = 3968) -> Recipe:
    """`sink` and `recent` tokens exact, `coded` tokens before those at 4 bits, the others dropped."""
    side = Side(allocation=Uniform(4), quantizer=Affine(PerToken(group), fit_group=True))
    return Recipe("streaming_int4", key=side, value=side, window=Streaming(sink, recent, coded))
