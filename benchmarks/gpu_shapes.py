"""What `gpu_check.py` and `gpu_compile.py` give the kernels: one layer of Llama 3.1 8B, 8 KV heads × 4 queries × 128.

Tables, bytes and frames are random: no kernel's time depends on them. Groups of coefficients are as water-filling forms
them at 32 bytes a side, 8 times less than bfloat16.
"""

from itertools import accumulate

import torch
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.byte_tables import ByteTables, Lookups
from karhunen.kernels.scan_attention.frames import Frames

H, Q, D, BLOCK = 8, 4, 128, 64
HALF = (1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 9)  # of 64 coefficients
SIZES = (*HALF, *HALF)

KINDS = {"free": (8, 0), "overlapping": (6, 6), "additive": (4, 4), "float16": None}
"""Tables by name: bits of the two look-ups of int8, or none where entries are float16."""


def tables_of(kind: str, h: int = H, d: int = D, sizes: tuple[int, ...] = SIZES) -> ByteTables:
    """Each head's coefficients shuffled and dealt to planes."""
    coefficient = torch.cat([torch.randperm(d)[: sum(sizes)] for _ in range(h)])
    columns = tuple(accumulate(sizes * h, initial=0))
    planes = tuple(i * len(sizes) for i in range(h + 1))
    if (bits := KINDS[kind]) is None:
        entries = (torch.randn(256, columns[-1]) / 2).half().float()
        return ByteTables(entries, coefficient, columns, planes, d)
    rows = [2**n if n else 0 for n in bits]
    low, high = (torch.randint(-60, 60, (n, columns[-1]), dtype=torch.int8) for n in rows)
    return ByteTables.of_lookups(Lookups(low, high, torch.rand(columns[-1]) * 0.02 + 0.005), coefficient, columns,
                                 planes, d)  # fmt: skip


def side_of(tables: ByteTables, t: int, b: int, device: torch.device, gain: bool = True) -> CodedTokens:
    """Random bytes and gains of one byte each, cut from larger buffers."""

    def cut(n: int) -> Tensor:
        room = torch.empty(b, n, t // 64 * 64 + 128, dtype=torch.uint8, device=device)
        return room.random_(0, 256)[..., :t]

    if not gain:
        return CodedTokens(cut(tables.n_planes), tables)
    levels = torch.linspace(-2, 1, 256, device=device).exp()
    return CodedTokens(cut(tables.n_planes), tables, cut(tables.n_heads), levels)


def frames_of(h: int = H, d: int = D, block: int | None = BLOCK, mean: bool = True) -> Frames:
    """A frame that turns every `block` tokens, with a mean and an offset."""
    n = d // 2 if block is not None else 0
    return Frames(
        torch.randn(h, d, d) / d**0.5,
        torch.randn(h, d) * 0.3 * mean,
        torch.randn(h, d) * mean,
        tuple(range(n)),
        tuple(range(n, 2 * n)),
        tuple((500000.0 ** -(torch.arange(n) / max(n, 1))).tolist()),
        block,
    )
