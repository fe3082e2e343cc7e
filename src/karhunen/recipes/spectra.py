"""SPECTRA (arXiv:2608.07915): decorrelate a layer's pre-RoPE keys and its values over all heads, water-fill the bits.

Reproduced: the latent joined over heads, energy-ordered, integer widths by groups of neighbouring coordinates, zero
bits as the rank cut, a float16 range per token and group. The latent is had from key and value moments: it spans the
space of the paper's G-weighted weights (transforms/spectra_latent.py; a test shows they agree), and with QK-norm it is
that of the normed keys, which are what a cache sees. Beside the recipe: the correction of W_O
(calibration/output_correction.py) and the folded model, whose latent is before the norm (hf/fold.py).
"""

from karhunen.allocation.water_filling import WaterFilling, bits_for
from karhunen.frames.rope_frame import RopeFrame
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.klt import KLT
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4.0}, 8: {"bits": 2.3, "value_bits": 1.7}, 12: {"bits": 1.333}}


def spectra(
    bits: float = 2.0,
    value_bits: float | None = None,
    ratio: float | None = None,
    group: int = 32,
    sink: int = 4,
    recent: int = 128,
) -> Recipe:
    """`bits` stored per element, ranges included; `value_bits` gives values a rate of their own. `ratio` states both as
    the compression of coded tokens against 16 bits, in place of `bits`."""
    rate = bits if ratio is None else bits_for(ratio)
    quantizer = Affine(PerToken(group), fit_group=True)
    return Recipe(
        "spectra",
        key=Side(
            frame=RopeFrame(1, joined=True),
            transform=KLT(center=False),
            allocation=WaterFilling(rate),
            quantizer=quantizer,
        ),
        value=Side(
            frame=RopeFrame(joined=True),
            transform=KLT(center=False),
            allocation=WaterFilling(rate if value_bits is None else value_bits),
            quantizer=quantizer,
        ),
        window=SinkRecent(sink, recent),
    )
