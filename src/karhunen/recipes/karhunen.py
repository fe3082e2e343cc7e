"""karhunen: a Fisher metric, the block-relative RoPE frame, one water line for the model, byte codes.

Source: this project, from SPECTRA (arXiv:2608.07915) and NOVA-KV (arXiv:2608.04074); docs/theory.md.
Keys and values are transformed so that squared error is loss of the model's own predictions (nats); one reverse
water-filling splits the bytes between layers, heads, sides and coefficients; each byte is one table look-up.
"""

from functools import partial

from karhunen.allocation.water_filling import WaterFilling, one_budget
from karhunen.frames.rope_frame import RopeFrame
from karhunen.metrics.fisher import FisherMetric
from karhunen.quantizers.byte_vq import ByteVQ, TableKind
from karhunen.quantizers.embedded import embedded
from karhunen.recipe import Recipe, Side
from karhunen.transforms.klt import KLT
from karhunen.windows.refining import shares
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.small_norm import SmallNorm

USUAL_BITS = 2.0
RATES = {4: {"bits": 4.0}, 8: {"bits": 2.0}, 12: {"bits": 1.333}, 16: {"bits": 1.0}}


def karhunen(
    bits: float = USUAL_BITS,
    ratio: float | None = None,
    token_bytes: int | None = None,
    block_tokens: int = 64,
    sink: int = 4,
    recent: int = 128,
    joined: bool = False,
    tables: TableKind = "free",
    progressive: bool = False,
    base_bits: float = 1.0,
    layer_bits: float = 1.0,
    layers: int = 3,
) -> Recipe:
    """`bits` stored per element on average over the model; or, in place of it, the same budget as `ratio` to 16 bits or
    as `token_bytes`, the bytes of one coded token in all layers. `joined`: one vector of a layer's heads side by side,
    which errs less, costs more to read and has tables of the square of the heads. `progressive`: a base of `base_bits`
    for every token, and up to `layers` refinements of `layer_bits` for those that are looked at (docs/progressive.md).
    """
    rate = one_budget(bits, USUAL_BITS, ratio, token_bytes)
    split = shares(rate, progressive, base_bits, layer_bits, layers, token_bytes)
    side = partial(
        Side,
        metric=FisherMetric(),
        transform=KLT(),
        allocation=WaterFilling(split.base_bits, "model", token_bytes),
        quantizer=embedded(ByteVQ(tables=tables), split.layers),
    )
    return Recipe(
        "karhunen",
        key=side(frame=RopeFrame(block_tokens, joined=joined, center=True)),
        value=side(frame=RopeFrame(joined=joined)),
        window=split.window(SinkRecent(sink, recent, keep=SmallNorm(steady=True))),
    )
