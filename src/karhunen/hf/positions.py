"""Where a model says its tokens stand, as the left padding of each row: token i of row r stands at i − padding[r].

    position_ids [b t], or one each for time, height and width [3 b t] (multimodal rotary positions) ─▶ padding [b]

A codec that turns vectors by their positions serves tokens that stand one after the other, and no others.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

N_AXES = 3  # time, height, width; a fourth, in front of them, counts tokens for the mask and turns nothing


def left_padding(positions: Any, n_before: int, *, turns: bool) -> Int[Tensor, " b"] | None:
    """Padding of the rows of a forward of which `n_before` tokens are held; None if the model was not told where its
    tokens stand. If vectors are turned by their positions (`turns`): ValueError for tokens that do not stand one after
    the other. A step of one token asks nothing of the device."""
    if not isinstance(positions, Tensor) or not 1 <= positions.ndim <= 3:
        return None
    t = positions.shape[-1]
    if positions.ndim == 3:
        axes = positions[-N_AXES:]
        if t > 1 and bool((axes != axes[-1:]).any()):
            if turns:
                raise ValueError(
                    "tokens of an image stand at one position in time and others in height and width, and this codec "
                    "turns keys by one position; use a recipe that codes keys as they are cached, such as nova_kv, "
                    "kivi or int4"
                )
            return None
        positions = axes[-1]
    positions = positions.view(-1, t).long() if positions.ndim == 1 else positions.long()
    last = positions[:, -1]
    if turns and t > 1:
        expected = last[:, None] - torch.arange(t - 1, -1, -1, device=positions.device)
        padded = (positions == positions[:, :1]) & (positions <= 1)  # all alike, 0 or 1, as `generate` counts them
        if bool(((positions != expected) & ~padded).any()):
            raise ValueError(
                "the position_ids do not rise by one from token to token, and this codec turns keys by their "
                "positions; pad rows on the left, run texts one by one, or use a recipe that codes keys as they are "
                "cached, such as nova_kv, kivi or int4"
            )
    return n_before + t - 1 - last
