"""FP8, the serving engines' default choice: eight-bit floating point, one scale per token and head.

Source: vLLM's `--kv-cache-dtype fp8`. Departs: the scale is taken from each vector, not calibrated.
"""

from karhunen.quantizers.float8 import Float8
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {2: {}}


def fp8(number: str = "e4m3", sink: int = 0, recent: int = 0) -> Recipe:
    """`number` is e4m3 (three mantissa bits) or e5m2 (two)."""
    side = Side(quantizer=Float8(format=number))  # type: ignore[arg-type]
    return Recipe("fp8", key=side, value=side, window=SinkRecent(sink, recent))
