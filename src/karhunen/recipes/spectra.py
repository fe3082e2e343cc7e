"""SPECTRA (arXiv:2608.07915): decorrelate a layer's pre-RoPE keys and its values over all heads, water-fill the bits.

Reproduced: the latent joined over heads, energy-ordered, integer widths by groups of neighbouring coordinates, zero
bits as the rank cut, a float16 range per token and group. Departs: the latent comes from key and value moments.
"""

from karhunen.allocation.water_filling import WaterFilling
from karhunen.frames.rope_frame import RopeFrame
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.klt import KLT
from karhunen.windows.sink_recent import SinkRecent


def spectra(
    bits: float = 2.0, value_bits: float | None = None, group: int = 32, sink: int = 4, recent: int = 128
) -> Recipe:
    """`bits` stored per element, ranges included; `value_bits` gives values a rate of their own."""
    quantizer = Affine(PerToken(group), fit_group=True)
    return Recipe(
        "spectra",
        key=Side(
            frame=RopeFrame(1, joined=True),
            transform=KLT(center=False),
            allocation=WaterFilling(bits),
            quantizer=quantizer,
        ),
        value=Side(
            frame=RopeFrame(joined=True),
            transform=KLT(center=False),
            allocation=WaterFilling(bits if value_bits is None else value_bits),
            quantizer=quantizer,
        ),
        window=SinkRecent(sink, recent),
    )
