"""Bits become integers here, once, by largest remainder; never by truncation.

Σ integers = total, exactly, and no integer is a whole bit away from its ideal
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def to_integers(ideal: Float[Tensor, " n"], total: int, most: int | None = None) -> Int[Tensor, " n"]:
    """Largest-remainder rounding of `ideal` (which sums to about `total`) to integers that sum to `total`.

    Where the ideal is off by more than one each, whole rounds are added or taken. No integer is below 0 or above
    `most`; ValueError if `total` cannot be reached so.
    """
    n = ideal.numel()
    if total < 0 or (most is not None and total > most * n):
        raise ValueError(f"{n} integers between 0 and {most} cannot sum to {total}")
    bits = ideal.floor().clamp(0, most).long()
    while missing := total - int(bits.sum()):
        step = 1 if missing > 0 else -1
        room = bits < most if step > 0 and most is not None else bits > 0 if step < 0 else torch.ones_like(bits).bool()
        wish = torch.where(room, step * (ideal - bits), torch.full_like(ideal, -torch.inf))
        winners = wish.sort(descending=True, stable=True).indices[: min(abs(missing), int(room.sum()))]
        bits[winners] += step
    return bits
