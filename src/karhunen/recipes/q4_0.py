"""q4_0: llama.cpp's four-bit cache, blocks of 32 values of a token with a float16 scale that has a sign.

Source: `--cache-type-k q4_0 --cache-type-v q4_0` of llama.cpp; its Hadamard rotation of keys and values before they are
quantized is pull request 21038. Reproduced: both. Departs: the rotation is that of a whole head, where llama.cpp takes
blocks; tokens at both ends may be exact, as for every recipe here, and none are by default, as there.
"""

from typing import Literal

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.blocks import Blocks
from karhunen.recipe import Recipe, Side
from karhunen.transforms.identity import Identity
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {}}
ROTATIONS = {"none": Identity(), "hadamard": Hadamard()}


def q4_0(rotation: Literal["none", "hadamard"] = "hadamard", sink: int = 0, recent: int = 0) -> Recipe:
    """`rotation="none"` is LLAMA_ATTN_ROT_DISABLE=1."""
    side = Side(transform=ROTATIONS[rotation], allocation=Uniform(4), quantizer=Blocks("int4"))
    return Recipe("q4_0", key=side, value=side, window=SinkRecent(sink, recent))
