"""PolarQuant (arXiv:2502.02617): rotate at random, four rounds of polar coordinates, analytic tables for the angles.

Reproduced: keys and values in blocks of 16, 4 bits for the first round's angles and 2 for the others, float16 radii:
3.875 bits per coefficient, no calibration. Departs: the rotation is Haar; levels are the Lloyd–Max levels of the
angle's density, not k-means on the fly. (The other PolarQuant, arXiv:2502.00527, is `polarquant_pairs`.)
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.recursive_polar import RecursivePolar
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import RandomRotation
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 3}, 6: {"bits": 2}}


def polarquant(bits: int = 3, seed: int = 0, sink: int = 4, recent: int = 128) -> Recipe:
    """`bits` + 1 for a first angle, `bits` − 1 for the others, a radius for 16 coefficients."""
    side = Side(transform=RandomRotation(seed), allocation=Uniform(bits), quantizer=RecursivePolar())
    return Recipe("polarquant", key=side, value=side, window=SinkRecent(sink, recent))
