"""OTT, outlier tokens tracing (arXiv:2505.10938): KIVI, with tokens of short keys exact and out of the ranges.

Reproduced: keys per channel and values per token as KIVI's; tokens whose key is short, which act as sinks and stretch
the ranges of their block, are kept exact and leave the block's ranges as if they were not there. Departs: a
calibrated threshold names them instead of the three shortest of a running pool, so a token's place depends on it
alone; blocks of 32 tokens as for KIVI here (`group=128, recent=32` are the paper's).
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerChannel, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.small_norm import SmallNorm

RATES = {4: {"bits": 4, "group": 128}, 8: {"bits": 2, "group": 128}}  # the paper's group; 1 bit: as KIVI


def ott(bits: int = 2, group: int = 32, fraction: float = 0.5, sink: int = 4, recent: int = 128) -> Recipe:
    """KIVI's options, and the `fraction` of the usual key length below which a token stays exact."""
    return Recipe(
        "ott",
        key=Side(allocation=Uniform(bits), quantizer=Affine(PerChannel(group))),
        value=Side(allocation=Uniform(bits), quantizer=Affine(PerToken(group), fit_group=True)),
        window=SinkRecent(sink, recent, keep=SmallNorm("key", fraction)),
    )
