"""CommVQ (arXiv:2506.18879): additive codebooks for pre-RoPE keys that commute with the rotation.

Reproduced: keys as sums of codewords before RoPE, codebooks closed under the turns that commute with it, 1 or 2 bits;
values by additive codebooks too. Departs: codewords cover 8 rotary pairs, not a head; training is Lloyd's iteration
stage by stage, not EM with a learned encoder; the four quarter turns stand for the paper's binary combinations.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.frames.rope_frame import RopeFrame
from karhunen.quantizers.commuting_vq import CommutingVQ
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {8: {"bits": 2}, 12: {"bits": 1}}


def commvq(bits: int = 2, interleaved: bool = False, sink: int = 4, recent: int = 128) -> Recipe:
    """`bits` per coefficient and a gain; `interleaved` pairs (2i, 2i + 1), as GPT-J rotates them."""
    return Recipe(
        "commvq",
        key=Side(frame=RopeFrame(1), allocation=Uniform(bits), quantizer=CommutingVQ(interleaved=interleaved)),
        value=Side(allocation=Uniform(bits), quantizer=GroupVQ(size=8, depth=2)),
        window=SinkRecent(sink, recent),
    )
