"""The definition of byte decoding: each plane adds its entry to the coefficients it covers, in order, float32."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables


def byte_decode(codes: UInt8[Tensor, "b s t"], tables: ByteTables) -> Float[Tensor, "b h t c"]:
    """Coefficients of all tokens."""
    b, _, t = codes.shape
    out = torch.zeros(b, tables.n_heads, t, tables.n_coefficients, device=codes.device)
    for head in range(tables.n_heads):
        for j in range(tables.plane_start[head], tables.plane_start[head + 1]):
            entries, index = tables.plane(j)
            out[:, head, :, index] += entries.float()[codes[:, j].long()]
    return out
