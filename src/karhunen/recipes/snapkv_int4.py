"""SnapKV's eviction (arXiv:2404.14469) with what it keeps coded per token: three times as many tokens in the bytes.

Shows that eviction and quantization compose in one window: the prompt's queries choose, what stays is coded as it
leaves the exact window, and so is what comes later. Departs from the paper as `snapkv` does.
"""

from typing import Literal

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.windows.budget import Tokens
from karhunen.windows.observed_attention import ObservedAttention
from karhunen.windows.top_scored import TopScored

RATES = {4: {"kept": 1714}, 8: {"kept": 720}, 12: {"kept": 390}}  # of 2,048 tokens of prompt and 192 more, which stay


def snapkv_int4(
    kept: int = 2048,
    bits: int = 4,
    group: int = 64,
    recent: int = 32,
    kernel: int = 7,
    pooling: Literal["max", "mean"] = "max",
) -> Recipe:
    """SnapKV's options, and the `bits` and `group` of what is kept."""
    side = Side(allocation=Uniform(bits), quantizer=Affine(PerToken(group), fit_group=True))
    window = TopScored(ObservedAttention(recent, kernel, pooling), Tokens(kept), Tokens(recent), coded=True)
    return Recipe("snapkv_int4", key=side, value=side, window=window)
