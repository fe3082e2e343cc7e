"""Palu (arXiv:2407.21118): low-rank keys and values, a Hadamard rotation inside the latent, few bits for it.

Reproduced: the rank cut in the activation-weighted metric (here: principal axes of pre-RoPE keys and of values
without centering, which span the same latent), a Hadamard matrix over the latent, 3-bit latents per token. Departs:
all heads of a layer share the latent (the paper's J-LRD, its most accurate; it serves groups of 4 heads); the rank is
the same for every layer, not searched; the rank is rounded up to whole quantization groups.
"""

from functools import partial

from karhunen.allocation.leading import Leading
from karhunen.frames.rope_frame import RopeFrame
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.chain import ChainSpec
from karhunen.transforms.klt import KLT
from karhunen.transforms.leading_hadamard import LeadingHadamard
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4, "share": 0.8}, 8: {"bits": 3, "share": 0.5}, 12: {"bits": 2, "share": 0.45}}


def palu(bits: int = 3, share: float = 0.5, group: int = 32, sink: int = 4, recent: int = 128) -> Recipe:
    """`bits` for each of the leading `share` of a layer's coefficients, a range for each `group` of them."""
    side = partial(
        Side,
        transform=ChainSpec((KLT(center=False), LeadingHadamard(share))),
        allocation=Leading(bits, share),
        quantizer=Affine(PerToken(group), fit_group=True),
    )
    return Recipe(
        "palu",
        key=side(frame=RopeFrame(1, joined=True)),
        value=side(frame=RopeFrame(joined=True)),
        window=SinkRecent(sink, recent),
    )
