"""What a recipe asks of calibration: which statistic, of which side of the cache, in which frame.

| kind          | statistic | of what |
|---------------|-----------|---------|
| `moments`     | Moments   | keys or values in the frame |
| `samples`     | Samples   | the same vectors kept, every `stride`-th token |
| `queries`     | Moments   | queries of a head's group in the key frame, as scaled in the softmax, per key block |
| `attended`    | Moments   | values weighted by the attention they receive, Σ_m a_mn² over the group's query rows m |
| `gradients`   | Moments   | gradients of the model's log-likelihood by key or value, in the frame (Fisher) |
| `output_gram` | Moments   | outer = Σ W_O W_Oᵀ over the group's query heads: the cost of a value error |

`weighting` of `queries` is `uniform` (every visible key counts alike) or `attention` (the softmax's own sensitivity
a(1 − a)). `gradients` count reads of tokens that have left a recent window only (karhunen.hf.gradients). The first
`skip_tokens` of each sequence, which the window keeps exact, count nowhere; nor do tokens whose vector of `quiet_slot`
is shorter than `quiet_fraction` of the sequence's median, which the window keeps exact too.
"""

from dataclasses import dataclass
from typing import Literal, final

from karhunen.statistics.moments import Moments
from karhunen.statistics.samples import Samples

Slot = Literal["key", "value"]
Kind = Literal["moments", "samples", "queries", "attended", "gradients", "output_gram"]
Statistic = Moments | Samples

SLOTS: tuple[Slot, Slot] = ("key", "value")


@final
@dataclass(frozen=True)
class Need:
    """One statistic of one slot; equal needs of different recipes are gathered once."""

    kind: Kind
    slot: Slot
    block_tokens: int | None = None
    joined: bool = False
    weighting: Literal["uniform", "attention"] = "uniform"
    stride: int = 1
    skip_tokens: int = 0
    quiet_slot: Slot | None = None
    quiet_fraction: float = 0.0

    def __str__(self) -> str:
        frame = "post-RoPE" if self.block_tokens is None else f"block {self.block_tokens}"
        return f"{self.kind} of the {self.slot}s ({frame}, {'heads joined' if self.joined else 'per head'})"
