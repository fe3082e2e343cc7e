"""The rotation R(n) that a model applies to the queries and keys at position n.

    R(n) turns the pair of coordinates i by the angle n · inv_freq[i];   R(m) R(n) = R(m + n)

Source: RoFormer (arXiv:2104.09864), eq. 15. The frequencies are the model's own, scaling included.
Here:   only the rotation; a model's constant attention scaling (yarn) stays in the vector.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.device import on_host


@final
@dataclass(frozen=True)
class Rotary:
    """Rotary position encoding of `2 · len(inv_freq)` coordinates from `offset` on; the others pass unchanged.

    `interleaved` pairs coordinates (2i, 2i+1), as GPT-J and Cohere do; otherwise (i, i + r/2), as Llama does.
    """

    inv_freq: Float[Tensor, " pairs"]
    interleaved: bool = False
    offset: int = 0

    @property
    def n_rotated(self) -> int:
        """How many coordinates turn."""
        return 2 * self.inv_freq.shape[0]

    def rotate(self, x: Float[Tensor, "*batch t d"], positions: Int[Tensor, "*#rows t"]) -> Float[Tensor, "*batch t d"]:
        """R(positions) x, in the precision of x but at least float32. Negative positions undo a rotation."""
        start, end = self.offset, self.offset + self.n_rotated
        if end > x.shape[-1]:
            raise ValueError(f"a rotation of coordinates {start} to {end - 1} does not fit vectors of {x.shape[-1]}")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = self._turns(positions, x)  # [rows t pairs]
        turned = x[..., start:end]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        if pairs.shape[-1] == x.shape[-1]:
            return pairs
        return torch.cat([x[..., :start], pairs, x[..., end:]], dim=-1)

    @cached_property
    def _key(self) -> bytes:
        return self.inv_freq.detach().double().cpu().numpy().tobytes()

    def _turns(self, positions: Int[Tensor, "*rows t"], x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `x`; the layers of a model ask for the same, one after the other."""
        if not on_host(positions) or not on_host(x):  # to look for repeated ones, another device would be waited for
            angle = positions.double()[..., None] * self.inv_freq.to(x.device).double()
            return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return _remembered_turns(_bytes_of(positions), tuple(positions.shape), self._key, x.dtype)


def distinct(positions: Int[Tensor, "*rows t"]) -> tuple[Int[Tensor, " u"], Int[Tensor, "*rows t"]]:
    """Each of some positions in the host's memory once, in order, and which of them each is; neither is to be written
    to."""
    return _remembered_distinct(_bytes_of(positions), tuple(positions.shape))


def _turns_at(at: Tensor, where: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In a block-relative frame a block is one position, so few angles are turned into numbers."""
    angle = at.double()[:, None] * inv_freq
    return angle.cos().to(dtype)[where], angle.sin().to(dtype)[where]


def _bytes_of(positions: Tensor) -> bytes:
    return positions.long().contiguous().numpy().tobytes()


@lru_cache(maxsize=8)
def _remembered_distinct(positions: bytes, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of the bytes of int64 positions."""
    with torch.inference_mode(False), torch.no_grad():
        at = torch.from_numpy(np.frombuffer(positions, np.int64).copy()).reshape(shape)
        return at.unique(return_inverse=True)


@lru_cache(maxsize=8)
def _remembered_turns(
    positions: bytes, shape: tuple[int, ...], inv_freq: bytes, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of the bytes of int64 positions and float64 frequencies."""
    with torch.inference_mode(False), torch.no_grad():
        frequencies = torch.from_numpy(np.frombuffer(inv_freq, np.float64).copy())
        at, where = _remembered_distinct(positions, shape)
        return _turns_at(at, where, frequencies, dtype)
