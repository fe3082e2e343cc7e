"""KVTC (arXiv:2511.01815): principal components over all heads, widths by dynamic programming, DEFLATE. For storage.

Reproduced: RoPE undone, PCA over the heads of a layer, 0, 2, 4 or 8 bits for each group of components by an exact
knapsack, DEFLATE over pages of tokens, 4 sinks and 128 recent tokens exact. Departs: PCA joins heads, not layers; the
mean is a component like others, since without it no bits go to what queries see most (docs/log.md); groups are of one
size, with a float16 range per token. Reading inflates every page: a store for caches at rest.
"""

from functools import partial

from karhunen.allocation.dynamic_programming import DynamicProgramming
from karhunen.frames.rope_frame import RopeFrame
from karhunen.packing.deflate import Deflate
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.klt import KLT
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4.0}, 8: {"bits": 2.25}, 12: {"bits": 1.75}, 16: {"bits": 1.333}}


def kvtc(bits: float = 2.25, group: int = 32, page: int = 32, sink: int = 4, recent: int = 128) -> Recipe:
    """At most `bits` per element before DEFLATE, ranges included; pages of `page` tokens are deflated."""
    side = partial(
        Side,
        transform=KLT(center=False),
        allocation=DynamicProgramming(bits),
        quantizer=Affine(PerToken(group), fit_group=True),
        packing=Deflate(page),
    )
    return Recipe(
        "kvtc",
        key=side(frame=RopeFrame(1, joined=True)),
        value=side(frame=RopeFrame(joined=True)),
        window=SinkRecent(sink, recent),
    )
