"""vLLM's int4_per_token_head: a Hadamard rotation, then one asymmetric four-bit range for a token's whole head.

Source: vLLM's `--kv-cache-dtype int4_per_token_head`. Reproduced: the rotation, the range, four bytes of it for a token
and head. Departs: those are a float16 low end and step, where vLLM has a float32 scale with the zero point in its last
bits; the rotation has no random signs.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {}}


def int4_per_token_head(sink: int = 0, recent: int = 0) -> Recipe:
    """A format: only the window may be chosen."""
    side = Side(transform=Hadamard(), allocation=Uniform(4), quantizer=Affine(PerToken()))
    return Recipe("int4_per_token_head", key=side, value=side, window=SinkRecent(sink, recent))
