"""Kitty (arXiv:2511.18643): 2-bit keys per channel, with a few channels of every page at 4 bits, chosen page by page.

Reproduced: per-channel ranges, an eighth of the channels boosted by 2 bits, pages split into parts of one width,
values at 2 bits per token, first tokens exact. Departs: pages of 32 tokens as for KIVI here (`page=128` is the
paper's); channels are ranked by the width of their range in the page.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.boosted import Boosted
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4, "page": 128, "group": 128}, 8: {"page": 128, "group": 128}}  # the paper's page; 1 bit: as KIVI


def kitty(
    bits: int = 2, page: int = 32, share: float = 0.125, group: int = 32, sink: int = 4, recent: int = 128
) -> Recipe:
    """`bits` for all, 2 more for `share` of the key channels of each `page` tokens; values in groups of `group`."""
    return Recipe(
        "kitty",
        key=Side(allocation=Uniform(bits), quantizer=Boosted(page, share)),
        value=Side(allocation=Uniform(bits), quantizer=Affine(PerToken(group), fit_group=True)),
        window=SinkRecent(sink, recent),
    )
