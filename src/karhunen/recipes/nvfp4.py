"""NVFP4: four-bit floats (E2M1) with a float8 scale for each 16 values of a token.

Source: NVIDIA's format, `kv_cache_dtype` nvfp4 of TensorRT-LLM and vLLM. Reproduced: E2M1, e4m3 scales of 16 values,
round to nearest even. Departs: the scale of a whole tensor is `unit`, 1 as engines have it where none was calibrated.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.blocks import Blocks
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {}}


def nvfp4(unit: float = 1.0, sink: int = 0, recent: int = 0) -> Recipe:
    """`unit` multiplies every scale."""
    side = Side(allocation=Uniform(4), quantizer=Blocks("float4", "e4m3", 16, unit))
    return Recipe("nvfp4", key=side, value=side, window=SinkRecent(sink, recent))
