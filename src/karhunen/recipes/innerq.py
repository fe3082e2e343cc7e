"""InnerQ (arXiv:2602.23200): groups of 32 along the axis that attention sums over, a sign and a magnitude each.

Reproduced, from the abstract and the authors' code (mthcom/innerq): keys in groups of 32 channels of a token, over
the square root of a channel's peak; values in groups of 32 tokens of a channel; 32 first and 96 newest tokens exact;
3 bits, or 2 for values (`value_bits=2`); with `hybrid` a group of values may be a range. Departs: peaks are those of
the calibration text, where InnerQ takes the prompt's; with `hybrid` every group of values stores a low end.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import PerChannel, PerToken
from karhunen.quantizers.sign_magnitude import SignMagnitude
from karhunen.recipe import Recipe, Side
from karhunen.transforms.peak_scale import PeakScale
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4, "value_bits": 3}, 5: {}, 6: {"value_bits": 2}}


def innerq(
    bits: int = 3, value_bits: int = 3, group: int = 32, hybrid: bool = False, sink: int = 32, recent: int = 96
) -> Recipe:
    """`bits` of keys and `value_bits` of values count the sign; `hybrid` is of values."""
    return Recipe(
        "innerq",
        key=Side(transform=PeakScale(), allocation=Uniform(bits), quantizer=SignMagnitude(PerToken(group))),
        value=Side(allocation=Uniform(value_bits), quantizer=SignMagnitude(PerChannel(group), hybrid)),
        window=SinkRecent(sink, recent),
    )
