"""MXFP4: four-bit floats (E2M1) with a power of two as the scale of each 32 values of a token.

Source: OCP Microscaling Formats 1.0, `mxfp4` caches of SGLang. Reproduced: E2M1, e8m0 scales of 32 values (the largest
power of two below the largest value, over 4), round to nearest even, saturation at 6.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.blocks import Blocks
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {}}


def mxfp4(sink: int = 0, recent: int = 0) -> Recipe:
    """A format: only the window may be chosen."""
    side = Side(allocation=Uniform(4), quantizer=Blocks("float4", "e8m0", 32))
    return Recipe("mxfp4", key=side, value=side, window=SinkRecent(sink, recent))
