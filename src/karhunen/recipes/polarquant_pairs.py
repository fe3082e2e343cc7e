"""PolarQuant (arXiv:2502.00527): the radius and the angle of a key's rotary pairs; values per token.

Reproduced: post-RoPE keys, a width for the radius (per channel, asymmetric) and one for the angle; values evenly
spaced. Below four bits an angle needs more than a radius (`angle_extra`).
Departs: ranges over 32 tokens and not 128, so that all per-channel methods compare at one block (`group=128` is the
paper's); angles take equal sectors of the circle and no range. (arXiv:2502.02617 of the same name is `polarquant`.)
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.pair_polar import PairPolar, pair_widths
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {
    4: {"angle_extra": 1, "group": 128},
    6: {"bits": 3, "angle_extra": 1, "group": 128},
    8: {"bits": 2, "angle_extra": 1, "group": 128, "clip": 0.79},
}


def polarquant_pairs(
    bits: int = 4,
    angle_extra: int = 0,
    clip: float = 1.0,
    group: int = 32,
    interleaved: bool = False,
    sink: int = 4,
    recent: int = 128,
) -> Recipe:
    """`bits` for each value coefficient and, on average, for radius and angle: `bits` ∓ `angle_extra`.

    `clip` narrows the ranges of radii and values; `interleaved` pairs (2i, 2i + 1), as GPT-J rotates them.
    """
    pair_widths(bits, angle_extra)  # refuses what no pair can be given, before anything is calibrated
    return Recipe(
        "polarquant_pairs",
        key=Side(allocation=Uniform(bits), quantizer=PairPolar(group, interleaved, angle_extra, clip)),
        value=Side(allocation=Uniform(bits), quantizer=Affine(PerToken(group), clip, fit_group=True)),
        window=SinkRecent(sink, recent),
    )
