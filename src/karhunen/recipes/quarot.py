"""QuaRot (arXiv:2404.00456), the KV part: a Hadamard rotation of each head, then per-token asymmetric quantization.

Reproduced: the rotation on post-RoPE keys and on values, asymmetric ranges by group of 128. Departs: nothing is folded
into the weights, the rotation is part of the codec; ranges end at a quantile (`clip`; 1.0 is the whole range), where
the paper shrinks them to 0.95 of their length.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent

RATES = {
    4: {"bits": 4},
    8: {"bits": 2, "clip": 0.94},
    12: {"bits": 1, "clip": 0.79},
}  # clips: the least error of a Gaussian


def quarot(bits: int = 4, group: int = 128, clip: float = 1.0, sink: int = 4, recent: int = 128) -> Recipe:
    """`bits` after a Hadamard rotation, one range for each `group` coefficients of a token."""
    side = Side(
        transform=Hadamard(),
        allocation=Uniform(bits),
        quantizer=Affine(PerToken(group), clip=clip, fit_group=True),
    )
    return Recipe("quarot", key=side, value=side, window=SinkRecent(sink, recent))
