"""INT2: per token, asymmetric, evenly spaced points in groups of neighbouring channels.

Source: the common baseline of the field; no paper.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {8: {}}


def int2(group: int = 64, sink: int = 4, recent: int = 128) -> Recipe:
    """2 bits and a float16 range for each `group` channels of a token, or the largest divisor below it."""
    side = Side(allocation=Uniform(2), quantizer=Affine(PerToken(group), fit_group=True))
    return Recipe("int2", key=side, value=side, window=SinkRecent(sink, recent))
