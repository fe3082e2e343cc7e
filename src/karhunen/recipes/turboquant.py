"""TurboQuant, the MSE variant (arXiv:2504.19874): store the norm, rotate at random, Lloyd–Max for the known marginal.

Reproduced: Algorithm 1 for keys and values: a Haar rotation, the optimal scalar codebook, a float16 norm per vector.
Over draws of the rotation, the expected squared error of any one vector is 0.36, 0.117, 0.03, 0.009 of its squared norm
at 1 to 4 bits; one draw serves all tokens of a head, so a given vector's error scatters about that. Departs: the
codebook is the Gaussian's, to which the Beta marginal tends as heads grow; the paper's 2.5 and 3.5 bits (more bits for
outlier channels) are not offered.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.lloyd_max import LloydMax
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import RandomRotation
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4}, 8: {"bits": 2}, 12: {"bits": 1}}


def turboquant(bits: int = 4, seed: int = 0, sink: int = 4, recent: int = 128) -> Recipe:
    """`bits` per coefficient and a float16 norm; `seed` draws the rotation."""
    side = Side(transform=RandomRotation(seed), allocation=Uniform(bits), quantizer=LloydMax("float16"))
    return Recipe("turboquant", key=side, value=side, window=SinkRecent(sink, recent))
