"""Inputs of a call that reads coded tokens, by shape."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from tests.synthetic import seeded
from torch import Tensor

from karhunen.kernels.byte_attention import CodedTokens
from karhunen.kernels.byte_tables import ByteTables, Lookups
from karhunen.kernels.scan_attention import Frames


@dataclass(frozen=True)
class Example:
    """One call's inputs, by shape; bytes lie in a larger buffer, as a cache keeps them."""

    b: int = 1
    h: int = 2
    r: int = 3
    d: int = 16
    t: int = 300
    sizes: tuple[int, ...] = (1, 2, 3, 10)
    block: int | None = 64
    first: int = 4
    kind: tuple[int, int] = (8, 0)
    rest: int = 0
    joined: bool = False
    mean: bool = True
    gain: str = ""

    def query(self) -> Tensor:
        return torch.randn(self.b, self.h, self.r, self.d, generator=seeded(1))

    def side(self, seed: int) -> CodedTokens:
        generator = seeded(seed)
        groups = 1 if self.joined else self.h
        n, (a, b) = groups * sum(self.sizes), self.kind
        low, high = (
            torch.randint(-60, 60, (rows, n), generator=generator, dtype=torch.int8)
            for rows in (2**a, 2**b if b else 0)
        )
        tables = ByteTables.of_lookups(
            Lookups(low, high, torch.rand(n, generator=generator) * 0.02 + 0.005),
            torch.cat([torch.randperm(self.d, generator=generator)[: sum(self.sizes)] for _ in range(groups)]),
            tuple(accumulate(self.sizes * groups, initial=0)),
            tuple(i * len(self.sizes) for i in range(groups + 1)),
            self.d,
        )
        shape = (self.b, tables.n_planes, self.t + 37)
        codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)[..., : self.t]
        gain = torch.rand(self.b, groups, self.t, generator=generator) + 0.5
        if self.gain == "levels":
            return CodedTokens(codes, tables, (40 * gain).to(torch.uint8), torch.arange(256) / 40)
        return CodedTokens(codes, tables, gain.half() if self.gain == "half" else None)

    def frames(self) -> Frames:
        generator = seeded(4)
        n = (self.d - self.rest) // 2 if self.block else 0
        mean = torch.randn(self.h, self.d, generator=generator)
        return Frames(
            torch.randn(self.h, self.d, self.d, generator=generator) / self.d**0.5,
            torch.randn(self.h, self.d, generator=generator) * 0.3,
            mean if self.mean else torch.zeros_like(mean),
            tuple(range(n)),
            tuple(range(n, 2 * n)),
            tuple((10000.0 ** -(torch.arange(n) / max(n, 1))).tolist()),
            self.block,
        )
