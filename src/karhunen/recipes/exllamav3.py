"""exllamav3's quantized cache: groups of 32 values, each rotated by itself, at 2 to 8 bits for keys and for values.

Source: `--cache_quant K,V` of exllamav3 (turboderp-org/exllamav3, `CacheLayer_quant`). Reproduced: rotation,
midpoints, a float16 scale for 32 values. Departs: symbols are packed in order, not in planes of 1, 2, 4 and 8 bits; the
cubic compander, which is off there too, is not offered.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.midpoints import Midpoints
from karhunen.recipe import Recipe, Side
from karhunen.transforms.block_hadamard import BlockHadamard
from karhunen.values import refuse_unless_whole
from karhunen.windows.sink_recent import SinkRecent

RATES = {
    2: {"key_bits": 8, "value_bits": 8},
    4: {},
    5: {"key_bits": 3, "value_bits": 3},
    6: {"key_bits": 2, "value_bits": 2},
}


def exllamav3(key_bits: int = 4, value_bits: int = 4, sink: int = 0, recent: int = 0) -> Recipe:
    """`key_bits` and `value_bits` from 2 to 8, and half a bit more for the scales."""
    refuse_unless_whole(key_bits=key_bits, value_bits=value_bits)
    if not (2 <= key_bits <= 8 and 2 <= value_bits <= 8):
        raise ValueError(f"key_bits={key_bits}, value_bits={value_bits}: exllamav3 codes a number in 2 to 8 bits")
    key, value = (
        Side(transform=BlockHadamard(), allocation=Uniform(bits), quantizer=Midpoints())
        for bits in (key_bits, value_bits)
    )
    return Recipe("exllamav3", key=key, value=value, window=SinkRecent(sink, recent))
