"""MLX's quantized cache: an affine range for each 64 values of a token, with zero among its points.

Source: mlx-lm's `QuantizedKVCache` (`--kv-bits 4 --kv-group-size 64`), `mx.quantize`. Reproduced: the range and its
rounding. Departs: scale and bias are float16 whatever the model; mlx-lm begins to quantize after 5,000 tokens
(`--quantized-kv-start`), all of them at once, here tokens are coded as they leave the window.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.anchored import Anchored
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {2: {"bits": 8}, 4: {"bits": 4}}


def mlx(bits: int = 4, group: int = 64, sink: int = 0, recent: int = 0) -> Recipe:
    """`bits` per value, 32 more for each `group`."""
    side = Side(allocation=Uniform(bits), quantizer=Anchored(group))
    return Recipe("mlx", key=side, value=side, window=SinkRecent(sink, recent))
