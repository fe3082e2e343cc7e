"""karhunen: the block-relative RoPE frame, an attention-weighted metric, one water line for the model, byte codes.

Source: this project, from SPECTRA (arXiv:2608.07915) and NOVA-KV (arXiv:2608.04074).
"""

from karhunen.allocation.water_filling import WaterFilling
from karhunen.frames.rope_frame import RopeFrame
from karhunen.metrics.output import OutputMetric
from karhunen.metrics.query import QueryMetric
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.recipe import Recipe, Side
from karhunen.transforms.klt import KLT
from karhunen.windows.sink_recent import SinkRecent


def karhunen(
    bits: float = 2.0,
    value_bits: float | None = None,
    block_tokens: int = 64,
    gain: str = "log8",
    scope: str = "layer",
    sink: int = 4,
    recent: int = 128,
) -> Recipe:
    """`bits` stored per element, gains included; `value_bits` gives values a rate of their own."""
    quantizer = ByteVQ(gain=gain)  # type: ignore[arg-type]
    return Recipe(
        "karhunen",
        key=Side(
            frame=RopeFrame(block_tokens),
            metric=QueryMetric("attention"),
            transform=KLT(),
            allocation=WaterFilling(bits, scope),  # type: ignore[arg-type]
            quantizer=quantizer,
        ),
        value=Side(
            metric=OutputMetric(),
            transform=KLT(),
            allocation=WaterFilling(bits if value_bits is None else value_bits, scope),  # type: ignore[arg-type]
            quantizer=quantizer,
        ),
        window=SinkRecent(sink, recent),
    )
