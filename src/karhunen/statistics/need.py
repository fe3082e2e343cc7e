"""What a recipe asks of calibration: which statistic, of which side of the cache, in which frame.

| kind          | statistic | of what |
|---------------|-----------|---------|
| `moments`     | Moments   | keys or values in the frame |
| `samples`     | Samples   | the same vectors kept, every `stride`-th token |
| `queries`     | Moments   | queries of a head's group in the key frame, as scaled in the softmax, per key block |
| `attended`    | Moments   | values weighted by the attention they receive, Σ_m a_mn² over the group's query rows m |
| `outputs`     | Moments   | attention's outputs Σ_n a_mn v_n over the group's query rows m: VᵀSᵀSV of a value group |
| `gradients`   | Moments   | gradients of the model's log-likelihood by key or value, in the frame (Fisher) |
| `activations` | Moments   | hidden states that the layer's projections read: their Gram matrix |
| `projection`  | Projection | the weights and bias that make keys (before RoPE) or values of the hidden states |
| `output_gram` | Moments   | outer = Σ W_O W_Oᵀ over the group's query heads: the cost of a value error |

`weighting` of `queries` is `uniform` (every visible key counts alike) or `attention` (the softmax's own sensitivity
a(1 − a)); `scores` is for `attended` alone and weighs a value by E (qᵀk)², which takes no softmax. `gradients` count
reads by tokens `near_tokens` later and more, which find the token outside the recent window (karhunen.hf.gradients).
The first `skip_tokens` of each sequence, which the window keeps exact, count nowhere; nor do tokens whose vector of
`quiet_slot` is shorter than `quiet_fraction` of the sequence's median, which the window keeps exact too.

What a recipe asks of the keys it asks of what turns with the position. Latent attention caches that as values, and its
latent as keys: there a need is measured, and found, under the other slot (`exchanged`).
"""

from dataclasses import dataclass, replace
from typing import Literal, final

from karhunen.statistics.moments import Moments
from karhunen.statistics.projection import Projection
from karhunen.statistics.samples import Samples

Slot = Literal["key", "value"]
Kind = Literal[
    "moments", "samples", "queries", "attended", "outputs", "gradients", "activations", "projection", "output_gram"
]
Statistic = Moments | Samples | Projection
OF_WEIGHTS: tuple[Kind, Kind] = ("projection", "output_gram")  # known from the model alone: any text gives the same
OF_READS: tuple[Kind, ...] = ("queries", "attended", "outputs", "output_gram")
"""Sums over all that reads the cached vectors: query heads of the layer's group, and those of other layers that read
what this one has cached."""

SLOTS: tuple[Slot, Slot] = ("key", "value")


def other_slot(slot: Slot) -> Slot:
    """The values' of the keys', and the other way round."""
    return "value" if slot == "key" else "key"


@final
@dataclass(frozen=True)
class Need:
    """One statistic of one slot; equal needs of different recipes are gathered once."""

    kind: Kind
    slot: Slot
    block_tokens: int | None = None
    joined: bool = False
    weighting: Literal["uniform", "attention", "scores"] = "uniform"
    stride: int = 1
    skip_tokens: int = 0
    quiet_slot: Slot | None = None
    quiet_fraction: float = 0.0
    near_tokens: int = 128

    def exchanged(self) -> "Need":
        """The same of the other slot."""
        quiet = None if self.quiet_slot is None else other_slot(self.quiet_slot)
        return replace(self, slot=other_slot(self.slot), quiet_slot=quiet)

    def __str__(self) -> str:
        frame = "post-RoPE" if self.block_tokens is None else f"block {self.block_tokens}"
        said = [frame, "heads joined" if self.joined else "per head"]
        if self.weighting != "uniform":
            said.append(f"weighted by {self.weighting}")
        if self.kind == "gradients":
            said.append(f"through reads {self.near_tokens} tokens later or more")
        if self.skip_tokens:
            said.append(f"without the first {self.skip_tokens} tokens")
        if self.quiet_slot is not None:
            said.append(f"without tokens whose {self.quiet_slot} is below {self.quiet_fraction:g} of the usual norm")
        return f"{self.kind} of the {self.slot}s ({', '.join(said)})"
