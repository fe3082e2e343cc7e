"""OCTOPUS (arXiv:2605.21226): rotate at random, then code three coordinates at a time, a length and a direction.

Reproduced, from the abstract and a summary of the paper: the octahedral map, Lloyd–Max levels for the known densities,
b + 1 bits for each of a direction's two numbers and b − 1 for the length, the search among nine neighbours. Departs:
the rotation is Haar, theirs a Hadamard matrix with random signs; the norm is float16, theirs float32; neither exact
layers nor the variant with a one-bit residual are offered.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.octahedral import Octahedral
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import RandomRotation
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4}, 5: {"bits": 3}, 6: {"bits": 2}}


def octopus(bits: int = 3, seed: int = 0, sink: int = 4, recent: int = 128) -> Recipe:
    """3 `bits` + 1 for a triplet and a float16 norm; `seed` draws the rotation."""
    side = Side(transform=RandomRotation(seed), allocation=Uniform(bits), quantizer=Octahedral())
    return Recipe("octopus", key=side, value=side, window=SinkRecent(sink, recent))
