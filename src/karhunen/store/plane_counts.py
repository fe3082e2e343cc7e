"""How many byte planes a coded token has: those that every token has, and those of each layer of refinement."""

from itertools import pairwise

from karhunen.codec import LayerCodec
from karhunen.quantizers.embedded import EmbeddedQuantizer
from karhunen.statistics.need import Slot


def base_planes(codec: LayerCodec, slot: Slot) -> int:
    """Planes that every token of a side has."""
    quantizer, layout = codec.side(slot).quantizer, codec.side(slot).layout
    return quantizer.edges[0] if isinstance(quantizer, EmbeddedQuantizer) else layout.bytes_per_token


def layer_planes(codec: LayerCodec, slot: Slot) -> tuple[int, ...]:
    """Planes of each layer of a side; none where nothing is refined."""
    quantizer = codec.side(slot).quantizer
    if not isinstance(quantizer, EmbeddedQuantizer):
        return ()
    return tuple(b - a for a, b in pairwise(quantizer.edges))
