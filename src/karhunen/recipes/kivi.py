"""KIVI (arXiv:2402.02750): keys per channel, values per token, the newest tokens exact.

Reproduced: post-RoPE keys in blocks of 32 tokens, values in groups of 32 channels, float16 ranges, 128 exact tokens.
Departs: sinks may be kept exact as well (as for every recipe here), so that methods compare at the same window.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerChannel, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {
    4: {"bits": 4, "group": 64},
    8: {"bits": 2, "group": 64},
}  # at 1 bit the ends of a range err more than zeros do


def kivi(bits: int = 2, group: int = 32, sink: int = 4, recent: int = 128) -> Recipe:
    """`bits` for all; a range for each key channel over `group` tokens and each `group` channels of a value."""
    return Recipe(
        "kivi",
        key=Side(allocation=Uniform(bits), quantizer=Affine(PerChannel(group))),
        value=Side(allocation=Uniform(bits), quantizer=Affine(PerToken(group), fit_group=True)),
        window=SinkRecent(sink, recent),
    )
