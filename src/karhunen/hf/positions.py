"""Where a model says its tokens stand, as the left padding of each row: token i of row r stands at i − padding[r].

    position_ids [b t], or one each for time, height and width [3 b t] (multimodal rotary positions) ─▶ padding [b]

A codec that turns vectors by their positions serves tokens that stand one after the other, and no others.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from karhunen.device import on_host
from karhunen.store.positions import NOWHERE, SEVERAL_POSITIONS

N_AXES = 3  # time, height, width; a fourth, in front of them, counts tokens for the mask and turns nothing


def left_padding(positions: Any, n_before: int, *, turns: bool) -> Int[Tensor, " b"] | None:
    """Padding of the rows of a forward of which `n_before` tokens are held; None if the model was not told where its
    tokens stand. If vectors are turned by their positions (`turns`): ValueError for tokens that do not stand one after
    the other. A step of one token asks nothing of the device: a row of it that stands at several positions there is
    NOWHERE, which is refused when the token is coded."""
    if not isinstance(positions, Tensor) or not 1 <= positions.ndim <= 3:
        return None
    t = positions.shape[-1]
    if positions.ndim == 3:
        axes = positions[-N_AXES:]
        apart = (axes != axes[-1:]).any(0)  # [b t]
        if t == 1 and not on_host(positions):
            return (n_before - axes[-1][:, 0].long()).masked_fill(apart[:, 0] & turns, NOWHERE)
        if bool(apart.any()):
            if turns:
                raise ValueError(SEVERAL_POSITIONS)
            return None
        positions = axes[-1]
    positions = positions.view(-1, t).long() if positions.ndim == 1 else positions.long()
    last = positions[:, -1]
    if turns and t > 1:
        expected = last[:, None] - torch.arange(t - 1, -1, -1, device=positions.device)
        padded = (positions == positions[:, :1]) & (positions <= 1)  # all alike, 0 or 1, as `generate` counts them
        padded &= (expected < 0) | (positions == last[:, None])  # in front of the first token, or all there is
        if bool(((positions != expected) & ~padded).any()):
            raise ValueError(
                "the position_ids do not rise by one from token to token, and this codec turns keys by their "
                "positions; pad rows on the left, run texts one by one, or use a recipe that codes keys as they are "
                "cached, such as nova_kv, kivi or int4"
            )
    return n_before + t - 1 - last
