"""The serving preset k3v4 of TurboQuant in vLLM: 3-bit keys with a corrected norm, 4-bit values.

Source: vLLM's `--kv-cache-dtype turboquant_k3v4_nc` (arXiv:2504.19874; the scheme is HIGGS', arXiv:2411.17525).
Reproduced: keys by a Hadamard rotation, Lloyd–Max levels and a norm that makes the reconstruction as long as the key;
values evenly spaced with a float16 range per token and head. Departs: no random signs before the Hadamard matrix; no
layer is skipped; first and newest tokens may be exact, as for every recipe here.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.norm_corrected import NormCorrected
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {}}


def turboquant_k3v4(sink: int = 4, recent: int = 128) -> Recipe:
    """A preset: only the window may be chosen."""
    return Recipe(
        "turboquant_k3v4",
        key=Side(transform=Hadamard(), allocation=Uniform(3), quantizer=NormCorrected()),
        value=Side(allocation=Uniform(4), quantizer=Affine(PerToken())),
        window=SinkRecent(sink, recent),
    )
