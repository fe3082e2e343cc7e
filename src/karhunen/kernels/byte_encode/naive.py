"""The definition of byte encoding: planes in order, each codes what the planes before it left of its coefficients.

    byte_j = argmin_i ½‖e_i‖² − Σ_k x_k e_ik        x ← x − e_byte        (ties: the lowest i)

The sum runs over the plane's columns in order, each product rounded before it is subtracted, all in float32: an order
any machine can keep, so the bytes are the same everywhere. For planes that share no coefficient this is plain search.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables


def byte_encode(coefficients: Float[Tensor, "b h t c"], tables: ByteTables) -> UInt8[Tensor, "b s t"]:
    """One byte per plane and token: the nearest entry."""
    require_agreement(coefficients, tables)
    b, h, t, _ = coefficients.shape
    left = coefficients.float().clone()
    codes = torch.empty(b, tables.n_planes, t, dtype=torch.uint8, device=coefficients.device)
    for head in range(h):
        for j in range(tables.plane_start[head], tables.plane_start[head + 1]):
            entries, index = tables.plane(j)
            entries = entries.float()
            distance = tables.half_norms[j].expand(b, t, 256)
            mine = left[:, head, :, index]
            for k in range(len(index)):
                distance = distance - mine[..., k, None] * entries[:, k]
            byte = lowest_argmin(distance)
            codes[:, j] = byte
            left[:, head, :, index] -= entries[byte]
    return codes


def lowest_argmin(distance: Float[Tensor, "b t 256"]) -> Tensor:
    """The lowest index of the smallest value; torch's own argmin promises no order among equals."""
    smallest = distance.amin(-1, keepdim=True)
    return torch.where(distance == smallest, torch.arange(256, device=distance.device), 256).amin(-1).clamp_max(255)


def require_agreement(coefficients: Tensor, tables: ByteTables) -> None:
    """ValueError unless the tables code vectors of this shape."""
    wanted = (tables.n_heads, tables.n_coefficients)
    if (coefficients.shape[1], coefficients.shape[3]) != wanted:
        raise ValueError(
            f"coefficients have shape {tuple(coefficients.shape)}; the tables want [b, {wanted[0]}, t, {wanted[1]}]"
        )
