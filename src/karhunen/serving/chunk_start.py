"""Where in its text a chunk stands, read from its keys, for caches that hand over chunks without saying so.

    m = mean of the chunk's keys, turned back as if it began at 0
    Σ over layers and heads of ⟨ R(−s) m, μ ⟩  is largest at the right start s

Keys have a large mean μ before RoPE, which a centered codec knows, and a chunk's start turns it by a known angle. A
wrong start costs accuracy and nothing else: it is written into the page, and decoding undoes what encoding did. In
latent attention the rotary part, cached as values, is what turns.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.codec import Codec, LayerCodec
from karhunen.device import HOST
from karhunen.statistics.need import SLOTS, Slot

Vectors = tuple[Float[Tensor, "h t d"], Float[Tensor, "h t e"]]


def needs_start(codec: Codec) -> bool:
    """Whether any layer's codes depend on positions."""
    return any(
        side.frame.needs_rotary and side.rotary is not None
        for layer in codec.layers.values()
        for side in (layer.key, layer.value)
    )


def can_find_start(codec: Codec) -> bool:
    """Whether a start can be read from what turns: some layer knows its mean."""
    return any(_turning(layer) for layer in codec.layers.values())


def chunk_start(codec: Codec, layers: Mapping[int, Vectors], first_head: int, max_tokens: int) -> int:
    """First position of a chunk, a multiple of its length below `max_tokens`, by the keys and values of some layers.

    `first_head`: which of a layer's heads the given ones begin with.
    """
    n_tokens = next(iter(layers.values()))[0].shape[1]
    starts = torch.arange(0, max(max_tokens, 1), n_tokens, device=HOST)
    score = torch.zeros(len(starts), dtype=torch.float64, device=HOST)
    for layer, given in layers.items():
        slot = _turning(codec.layers[layer]) if layer in codec.layers else None
        if slot is None:
            continue
        side, x = codec.layers[layer].side(slot), given[SLOTS.index(slot)]
        assert side.mean is not None and side.rotary is not None, "such a side was looked for"
        mean = side.mean[first_head : first_head + len(x)].double()
        own = side.rotary.rotate(x.double(), -torch.arange(n_tokens, device=HOST)).mean(1)
        turned = side.rotary.rotate(own[:, None].expand(-1, len(starts), -1), -starts)
        score += (turned * mean[:, None]).sum((0, 2)) / mean.square().sum().clamp_min(1e-12)
    return int(starts[score.argmax()])


def _turning(layer: LayerCodec) -> Slot | None:
    """The slot that turns and whose mean is known."""
    for slot in SLOTS:
        if layer.side(slot).mean is not None and layer.side(slot).rotary is not None:
            return slot
    return None
