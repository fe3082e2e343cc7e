"""FP8 with calibrated scales: eight-bit floating point, one scale per head for all tokens.

Source: the calibrated `k_scale` and `v_scale` of vLLM and SGLang, per head. Reproduced: e4m3 or e5m2, a token takes
exactly its bytes. Departs: no token is exact unless asked for; `fp8` is the same with a scale from each vector.
"""

from karhunen.quantizers.float8_static import StaticFloat8
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {2: {}}


def fp8_static(number: str = "e4m3", headroom: float = 1.0, sink: int = 0, recent: int = 0) -> Recipe:
    """`number` is e4m3 (three mantissa bits) or e5m2 (two); `headroom` times what calibration saw still fits."""
    side = Side(quantizer=StaticFloat8(number, headroom))  # type: ignore[arg-type]
    return Recipe("fp8_static", key=side, value=side, window=SinkRecent(sink, recent))
