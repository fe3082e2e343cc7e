"""RotateKV (arXiv:2501.16383): pre-RoPE keys rotated over groups of heads, strongest channels first; sinks exact.

Reproduced: channels reordered by strength, a Hadamard rotation over 4 heads of pre-RoPE keys and over each head of the
values, ranges per token over 128 coefficients with clipping, massive-activation tokens exact. Departs: those tokens are
found by their short values (windows/small_norm.py), not by the hidden state; the order comes from second moments.
"""

from functools import partial

from karhunen.allocation.uniform import Uniform
from karhunen.frames.rope_frame import RopeFrame
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.reordered_hadamard import ReorderedHadamard
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.small_norm import SmallNorm

# clips: the least error of a Gaussian; the paper clips at 2 bits
RATES = {4: {"bits": 4, "clip": 1.0}, 8: {"bits": 2}, 12: {"bits": 1, "clip": 0.79}}


def rotatekv(
    bits: int = 2, group: int = 128, clip: float = 0.97, heads: int = 4, sink: int = 4, recent: int = 128
) -> Recipe:
    """`bits` for all, a range for each `group` coefficients of a token, `heads` rotated together."""
    side = partial(Side, allocation=Uniform(bits), quantizer=Affine(PerToken(group), clip=clip, fit_group=True))
    return Recipe(
        "rotatekv",
        key=side(frame=RopeFrame(1, joined=True), transform=ReorderedHadamard(heads)),
        value=side(transform=Hadamard()),
        window=SinkRecent(sink, recent, keep=SmallNorm("value")),
    )
