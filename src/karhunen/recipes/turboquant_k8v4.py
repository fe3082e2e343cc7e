"""The serving preset k8v4 of TurboQuant in vLLM: float8 keys, 4-bit values.

Source: vLLM's `--kv-cache-dtype turboquant_k8v4`, the mildest of its four presets (arXiv:2504.19874 for the name).
Reproduced: e4m3 keys without a rotation, values evenly spaced with a float16 range per token and head.
Departs: a key's scale is taken from each vector; first and newest tokens may be exact, as for every recipe here.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.float8 import Float8
from karhunen.recipe import Recipe, Side
from karhunen.windows.sink_recent import SinkRecent

RATES = {3: {}}


def turboquant_k8v4(sink: int = 4, recent: int = 128) -> Recipe:
    """A preset: only the window may be chosen."""
    return Recipe(
        "turboquant_k8v4",
        key=Side(quantizer=Float8("e4m3")),
        value=Side(allocation=Uniform(4), quantizer=Affine(PerToken())),
        window=SinkRecent(sink, recent),
    )
