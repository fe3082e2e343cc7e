"""Where in its text a chunk stands, read from its keys, for caches that hand over chunks without saying so.

    m = mean of the chunk's keys, turned back as if it began at 0
    Σ over layers and heads of ⟨ R(−s) m, μ ⟩  is largest at the right start s

Keys have a large mean μ before RoPE, which a centered codec knows, and a chunk's start turns it by a known angle. A
wrong start costs accuracy and nothing else: it is written into the page, and decoding undoes what encoding did.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.codec import Codec
from karhunen.device import HOST


def needs_start(codec: Codec) -> bool:
    """Whether any layer's codes depend on positions."""
    return any(
        side.frame.needs_rotary and side.rotary is not None
        for layer in codec.layers.values()
        for side in (layer.key, layer.value)
    )


def can_find_start(codec: Codec) -> bool:
    """Whether a start can be read from keys: some layer knows their mean and turns them."""
    return any(layer.key.mean is not None and layer.key.rotary is not None for layer in codec.layers.values())


def chunk_start(codec: Codec, keys: Mapping[int, Float[Tensor, "h t d"]], first_head: int, max_tokens: int) -> int:
    """First position of a chunk, a multiple of its length below `max_tokens`, by the keys of some layers.

    `first_head`: which of a layer's heads the given ones begin with.
    """
    n_tokens = next(iter(keys.values())).shape[1]
    starts = torch.arange(0, max(max_tokens, 1), n_tokens, device=HOST)
    score = torch.zeros(len(starts), dtype=torch.float64, device=HOST)
    for layer, x in keys.items():
        side = codec.layers[layer].key if layer in codec.layers else None
        if side is None or side.mean is None or side.rotary is None:
            continue
        mean = side.mean[first_head : first_head + len(x)].double()
        own = side.rotary.rotate(x.double(), -torch.arange(n_tokens, device=HOST)).mean(1)
        turned = side.rotary.rotate(own[:, None].expand(-1, len(starts), -1), -starts)
        score += (turned * mean[:, None]).sum((0, 2)) / mean.square().sum().clamp_min(1e-12)
    return int(starts[score.argmax()])
