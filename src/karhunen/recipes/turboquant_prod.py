"""TurboQuant, the inner-product variant (arXiv:2504.19874): one bit of the keys' budget makes scores unbiased.

Reproduced: Algorithm 2 for keys: the MSE quantizer at b − 1 bits, then QJL on its residual (a sign per coefficient and
the residual's norm). Values, whose error is averaged and not multiplied, take Algorithm 1 at b bits. Departs: as the
MSE variant; the projection is one matrix for all heads.
"""

from functools import partial

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.lloyd_max import LloydMax
from karhunen.quantizers.residual_sign import ResidualSign
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import RandomRotation
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4}, 8: {"bits": 2}, 12: {"bits": 1}}


def turboquant_prod(bits: int = 4, seed: int = 0, sink: int = 4, recent: int = 128) -> Recipe:
    """`bits` per coefficient, of which a key spends one on its residual's signs."""
    side = partial(Side, transform=RandomRotation(seed), allocation=Uniform(bits))
    return Recipe(
        "turboquant_prod",
        key=side(quantizer=ResidualSign(LloydMax("float16"), seed)),
        value=side(quantizer=LloydMax("float16")),
        window=SinkRecent(sink, recent),
    )
