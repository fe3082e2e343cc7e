"""What a cache holds at a rate: exact tokens, coded tokens, and layers that stay as they are.

    bytes of a layer that grows = elements · (exact tokens · exact bits + coded tokens · coded bits) / 8

`exact + coded` tokens of a text are those of the recipe's own window at that length, so a short text is hardly smaller;
a nominal ratio has no window, and says what a long text tends to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from karhunen.planning.shape import EXACT_BITS, CacheLayer, ModelShape

Split = Callable[[int], tuple[int, int]]
"""Of so many tokens: how many are held exact, and how many coded; the others are dropped."""


@final
@dataclass(frozen=True)
class Tables:
    """Bytes of what a layer's coding stores once, keys and values together: transforms, and codebooks and widths.
    `n_groups` of heads have an equal share of each; where heads are joined there is one."""

    transforms: int = 0
    codebooks: int = 0
    n_groups: int = 1

    @property
    def total(self) -> int:
        """Bytes of all tables of the layer."""
        return self.transforms + self.codebooks


@final
@dataclass(frozen=True)
class Rate:
    """How a cache is held. `bits` of a coded number, side information included, by layer; None where a window drops
    tokens but none is coded; layers that are not named keep every token exact.
    `window` says in words what `split` keeps exact; `granule_tokens` are coded together. `notes` say what the figures
    leave out."""

    name: str
    bits: Mapping[CacheLayer, float | None]
    split: Split
    window: str = ""
    granule_tokens: int = 1
    tables: Mapping[CacheLayer, Tables] = field(default_factory=dict)
    calibrated: bool = False
    notes: tuple[str, ...] = ()

    def held_bytes(self, shape: ModelShape, n_tokens: int, exact_bits: float = EXACT_BITS) -> float:
        """Of one sequence, all layers."""
        return sum(n * self.layer_bytes(layer, n_tokens, exact_bits) for layer, n in shape.alike)

    def layer_bytes(self, layer: CacheLayer, n_tokens: int, exact_bits: float = EXACT_BITS) -> float:
        """Of one sequence in one layer."""
        if layer not in self.bits:
            return layer.dense_bytes(n_tokens, exact_bits)
        exact, coded = self.split(n_tokens)
        bits_per_number = exact * exact_bits + coded * (self.bits[layer] or 0.0)
        return layer.elements_per_token * bits_per_number / 8 + layer.state_bytes(exact_bits)

    def coded_bits(self, shape: ModelShape) -> float | None:
        """Bits of a coded number on average over the coded layers; None if none is coded."""
        coded = [(layer.elements_per_token * n, bits) for layer, n in shape.alike if (bits := self.bits.get(layer))]
        n_elements = sum(n for n, _ in coded)
        return sum(n * bits for n, bits in coded) / n_elements if n_elements else None

    def nominal_ratio(self, shape: ModelShape) -> float | None:
        """16 bits over those of a coded number; None if none is coded."""
        bits = self.coded_bits(shape)
        return EXACT_BITS / bits if bits else None

    def ratio(self, shape: ModelShape, n_tokens: int, exact_bits: float = EXACT_BITS) -> float:
        """Bytes of the uncompressed cache over those held, all layers and exact tokens included."""
        held = self.held_bytes(shape, n_tokens, exact_bits)
        return shape.dense_bytes(n_tokens, exact_bits) / held if held else 1.0

    def table_bytes(self, shape: ModelShape) -> int:
        """What is stored once for the model."""
        return sum(n * self.tables[layer].total for layer, n in shape.alike if layer in self.tables)


DENSE = Rate("dense", {}, lambda n_tokens: (n_tokens, 0), "every token exact")


def nominal(ratio: float, shape: ModelShape) -> Rate:
    """Every layer that grows `ratio` times smaller than at 16 bits, from the first token on. ValueError below 1."""
    if not 1 <= ratio < float("inf"):
        raise ValueError(f"a ratio of {ratio:g} is not a compression ratio; give 1 or more, such as 8")
    bits: dict[CacheLayer, float | None] = dict.fromkeys(shape.codable, EXACT_BITS / ratio)
    return Rate(f"{ratio:g}× nominal", bits, lambda n_tokens: (0, n_tokens))
