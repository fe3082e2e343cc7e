"""What attention from bytes reads."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables


@final
@dataclass(frozen=True)
class CodedTokens:
    """One side (keys or values) of one layer's coded tokens, the token axis last.

    `codes` and `gain` may be slices of larger buffers, as long as neighbouring tokens are neighbours in memory. With
    `gain_levels`, `gain` holds bytes that choose among them; without `gain` every token's gain is 1.
    """

    codes: UInt8[Tensor, "b s t"]
    tables: ByteTables
    gain: Float[Tensor, "b h t"] | UInt8[Tensor, "b h t"] | None = None
    gain_levels: Float[Tensor, " 256"] | None = None

    def __post_init__(self) -> None:
        b, s, t = self.codes.shape
        if self.codes.dtype != torch.uint8:
            raise TypeError(f"codes are {self.codes.dtype}; bytes (torch.uint8) are read")
        if s != self.tables.n_planes:
            raise ValueError(f"codes have {s} planes, the tables {self.tables.n_planes}")
        if self.gain is not None and self.gain.shape != (b, self.tables.n_heads, t):
            raise ValueError(f"gain has shape {tuple(self.gain.shape)}; {(b, self.tables.n_heads, t)} is wanted")
        if (self.gain_levels is not None) != (self.gain is not None and self.gain.dtype == torch.uint8):
            raise ValueError("gain_levels goes with a gain of bytes, and only with it")

    @property
    def n_tokens(self) -> int:
        """Coded tokens."""
        return self.codes.shape[-1]


def row_lanes(n_rows: int) -> int:
    """Rows that lie side by side for `n_rows` of them: whole vectors of 1, 2, 4 or 8."""
    lanes = next(lanes for lanes in (1, 2, 4, 8) if lanes >= min(n_rows, 8))
    return -(-n_rows // lanes) * lanes


def require_agreement(
    q_frames: Tensor,
    keys: CodedTokens,
    values: CodedTokens,
    key_bias: Tensor | None,
    offset_bias: Tensor | None,
    block_tokens: int | None,
    first_offset: int,
    mask: Tensor | None,
    first_visible: Tensor | None,
) -> None:
    """ValueError unless the shapes belong together."""
    b, h, q, n, c = q_frames.shape
    t = keys.n_tokens
    for name, side in (("keys", keys), ("values", values)):
        if side.tables.n_heads != h or side.codes.shape[0] != b or side.n_tokens != t:
            raise ValueError(
                f"{name} hold batch {side.codes.shape[0]}, {side.tables.n_heads} heads, {side.n_tokens} tokens; "
                f"the queries and keys ask for {b}, {h}, {t}"
            )
    if keys.tables.n_coefficients != c:
        raise ValueError(f"queries have {c} coefficients, the key tables {keys.tables.n_coefficients}")
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}; give 1 or more, or None for one frame")
    needed = 1 if block_tokens is None or not t else (t - 1 + first_offset) // block_tokens + 1
    if n < needed or first_offset < 0:
        raise ValueError(
            f"{t} tokens from offset {first_offset} lie in {needed} blocks of {block_tokens}; {n} frames were given"
        )
    for name, tensor, shape in (
        ("key_bias", key_bias, (b, h, q, n)),
        ("offset_bias", offset_bias, (b, h, q, n, block_tokens)),
        ("mask", mask, (b, t)),
        ("first_visible", first_visible, (b, q)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {shape} is wanted")
