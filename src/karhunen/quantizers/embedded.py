"""An embedded code: base bytes, then layers of bytes, each of what those before it leave over. Any prefix decodes.

    ŷ_l = ŷ_{l−1} + part_l(bytes of layer l),    part_l trained and water-filled on y − ŷ_{l−1}

    | base: p₀ planes | layer 1: p₁ planes | layer 2 … |      dropping layers is cutting planes off the end

Source: successive refinement (Equitz & Cover, 1991): a Gaussian source loses nothing by it; byte codes lose a little,
since what a byte leaves over has fewer bits to share bytes with.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import Allocation, RateCost
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.byte_vq import ByteVQ


@final
@dataclass(frozen=True)
class EmbeddedQuantizer(Quantizer):
    """`parts`: the base, then the layers, over the same groups and coefficients; none has gains."""

    parts: tuple[ByteQuantizer, ...]

    def __post_init__(self) -> None:
        if len({(part.g, part.c) for part in self.parts}) != 1 or {part.gain for part in self.parts} != {"none"}:
            raise ValueError("an embedded code is of one part or more, of one size, without gains")

    @property
    def base(self) -> ByteQuantizer:
        """What every token has."""
        return self.parts[0]

    @property
    def edges(self) -> tuple[int, ...]:
        """Planes of the base, of base and first layer, and so on."""
        return tuple(accumulate(len(part.plane_size) for part in self.parts))

    @property
    def widths(self) -> tuple[int, ...]:
        """Every symbol is a byte."""
        return (8,) * self.edges[-1]

    def check(self, g: int, c: int) -> None:
        """Each part's own."""
        for part in self.parts:
            part.check(g, c)

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Part after part, each of what is left."""
        rest, symbols = y.double(), list[Tensor]()
        for part in self.parts:
            codes = part.encode(rest)
            symbols.append(codes.symbols)
            rest = rest - part.decode(codes).double()
        return Codes(torch.cat(symbols, dim=1), {})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`, of as many parts as there are symbols of; ValueError where they end within one."""
        n = codes.symbols.shape[1]
        if n not in self.edges:
            raise ValueError(f"{n} symbols of a token end within a layer; layers end at {self.edges}")
        starts = (0, *self.edges[:-1])
        made = [
            part.decode(Codes(codes.symbols[:, start:stop], {}))
            for part, start, stop in zip(self.parts, starts, self.edges, strict=True)
            if stop <= n
        ]
        total = made[0]
        for more in made[1:]:
            total = total + more
        return total


@final
@dataclass(frozen=True)
class Embedded(QuantizerSpec):
    """A base of `inner` at the side's rates, and layers of it whose rates `layers` give, one allocation each. Layers
    are fitted one after the other (`refined`): each is allocated over what the others leave in the whole model."""

    inner: ByteVQ
    layers: tuple[Allocation, ...]
    needs_moments = True
    needs_samples = True

    def __post_init__(self) -> None:
        if self.inner.gain != "none":
            raise ValueError(f"gain={self.inner.gain!r}: what a layer refines has no gain; use gain='none'")

    def cost(self, c: int) -> RateCost:
        """That of the base, and of each layer."""
        return self.inner.cost(c)

    def fit(self, data: QuantizerData) -> EmbeddedQuantizer:
        """The base alone."""
        return EmbeddedQuantizer((self.inner.fit(data),))

    def rest(self, fitted: EmbeddedQuantizer, samples: Float[Tensor, "g n c"]) -> Float[Tensor, "g m c"]:
        """What the parts so far leave over, of as many samples as a layer is trained on."""
        some = samples[:, :: max(1, -(-samples.shape[1] // self.inner.max_samples))]
        return some - fitted.decode(fitted.encode(some[None]))[0].to(some.dtype)

    def refined(self, fitted: EmbeddedQuantizer, data: QuantizerData) -> EmbeddedQuantizer:
        """With one layer more, trained on `data.samples`: what `fitted` leaves over."""
        return replace(fitted, parts=(*fitted.parts, self.inner.fit(data)))


def embedded(inner: ByteVQ, layers: tuple[Allocation, ...]) -> QuantizerSpec:
    """`inner` itself where there are no layers."""
    return Embedded(inner, layers) if layers else inner
