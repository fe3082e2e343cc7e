"""The nearest entry of a table, by the one definition that every path keeps: karhunen.kernels.byte_encode.

Tables of 256 entries go through the byte kernel, which gives the same symbols in plain torch, Numba and Triton, so
neither a codec's tables nor a cache's bytes depend on what is installed. Other sizes are searched here, in float64.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.byte_encode import byte_encode
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.paths import fastest

BYTE_ENTRIES = 256


def byte_path(device: torch.device) -> str:
    """The fastest path of the byte kernels on this device."""
    return fastest("byte_encode", device.type)[0]


def nearest(
    x: Float[Tensor, "s n w"], entries: Float[Tensor, "s e w"], sizes: list[int] | None = None
) -> tuple[Int[Tensor, "s n"], Float[Tensor, "s n"]]:
    """For each vector of each set the index of its nearest entry, the lowest on a tie, and the squared distance to it.
    Only the first `sizes[i]` coordinates of set i count (all by default); the others are zero."""
    w = x.shape[-1]
    if entries.shape[1] == BYTE_ENTRIES:
        sizes = [w] * len(entries) if sizes is None else sizes
        planes = [
            [(entries[i, :, :size].float(), torch.arange(size, device=entries.device))] for i, size in enumerate(sizes)
        ]
        tables = ByteTables.from_planes(planes, w)
        chosen = byte_encode(x.float()[None], tables, path=byte_path(x.device))[0].long()
    else:
        half_norm = entries.double().square().sum(-1) / 2
        score = torch.baddbmm(half_norm[:, None], x.double(), entries.double().mT, beta=-1)  # ⟨x, e⟩ − ‖e‖²/2
        chosen = score.argmax(-1)
    error = x - entries.to(x.dtype).gather(1, chosen[..., None].expand(-1, -1, w))
    return chosen, error.square().sum(-1)
