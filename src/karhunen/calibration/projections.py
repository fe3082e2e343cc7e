"""The layer's own maps from hidden states to keys and values, proven on what it cached.

k_pre = h W_K + b_K,   v = h W_V + b_V
"""

from jaxtyping import Float
from torch import Tensor

from karhunen.frames.rope_frame import RopeFrame, join_heads
from karhunen.hf.capture import Attention, Observation
from karhunen.hf.input_maps import linear_map
from karhunen.statistics.need import Need
from karhunen.statistics.projection import Projection
from karhunen.statistics.rotary import Rotary

TOLERANCE = 2e-2  # relative; bfloat16 rounds twice on the way, a norm in between moves vectors by far more


def measure_projection(need: Need, seen: Observation, attention: Attention, rotary: Rotary | None) -> Projection:
    """W and b of one side.

    ValueError where the cached vectors are not h W + b: a norm stands in between (QK-norm), or the module keeps its
    weights in another form.
    """
    found = linear_map(attention.module, need.slot)
    if found is None:
        raise ValueError(
            f"layer {seen.layer}: {type(attention.module).__name__} has no plain projection to the {need.slot}s; "
            "use the KLT of the cached vectors instead of a latent of the weights"
        )
    hidden = hidden_states(need, seen, attention)[:1]
    made = hidden.float() @ found.weight.to(hidden.device) + found.bias.to(hidden.device)
    raw = (seen.key if need.slot == "key" else seen.value)[:1]
    cached = join_heads(RopeFrame(1).forward(raw, seen.positions[:1], rotary))[:, 0].float()
    difference = (made - cached)[0, seen.valid[0]] if made.shape == cached.shape else cached
    error = float(difference.norm() / cached[0, seen.valid[0]].norm().clamp_min(1e-30))
    if not error <= TOLERANCE:
        raise ValueError(
            f"layer {seen.layer}: the cached {need.slot}s are not the hidden states times the projection (relative "
            f"difference {error:.2g}): there is a norm in between, as in QK-norm models; "
            "use the KLT of the cached vectors instead of a latent of the weights"
        )
    return found


def hidden_states(need: Need, seen: Observation, attention: Attention) -> Float[Tensor, "b t hidden"]:
    """What the layer's projections read; ValueError where it was not seen."""
    if attention.hidden is None:
        raise ValueError(f"layer {seen.layer}: {need} cannot be measured: its hidden states were not seen")
    return attention.hidden
