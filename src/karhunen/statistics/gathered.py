"""Everything calibration measured of one model: the artifact between `calibrate` and `fit`.

gathered(text A) + gathered(text B) == gathered(A ++ B)

A recipe's side for keys is meant for what turns with the position. Latent attention caches its latent under the name of
keys and the rotary part, which turns, under that of values: its layers exchange them before a recipe is fitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import OF_WEIGHTS, Need, Slot, Statistic
from karhunen.statistics.projection import Projection
from karhunen.statistics.rotary import Rotary
from karhunen.statistics.samples import Samples

T = TypeVar("T", Moments, Samples, Projection)


@final
@dataclass(frozen=True)
class LayerStatistics:
    """What was measured of one layer: the rotation each slot carries, the softmax scale, and the statistics."""

    key_rotary: Rotary | None = None
    value_rotary: Rotary | None = None
    softmax_scale: float = 1.0
    n_tokens: int = 0
    measured: Mapping[Need, Statistic] = field(default_factory=dict)

    def rotary(self, slot: Slot) -> Rotary | None:
        """The rotation of a slot's vectors, None if the model leaves them alone."""
        return self.key_rotary if slot == "key" else self.value_rotary

    @property
    def turns_in_values(self) -> bool:
        """Whether the part that turns with the position is cached under the name of values (latent attention)."""
        return self.value_rotary is not None and self.key_rotary is None

    def exchanged(self) -> "LayerStatistics":
        """With keys for values and values for keys."""
        measured = {need.exchanged(): statistic for need, statistic in self.measured.items()}
        return replace(self, key_rotary=self.value_rotary, value_rotary=self.key_rotary, measured=measured)

    def get(self, need: Need, kind: type[T]) -> T:
        """The statistic asked for; ValueError if calibration did not gather it."""
        found = self.measured.get(need)
        if found is None:
            have = "; ".join(sorted(str(n) for n in self.measured)) or "none"
            raise ValueError(
                f"the recipe needs {need}, which these statistics do not hold (they hold: {have}); "
                "calibrate again with this recipe"
            )
        if not isinstance(found, kind):
            raise TypeError(f"{need} is a {type(found).__name__}, not a {kind.__name__}")
        return found

    def __add__(self, other: "LayerStatistics") -> "LayerStatistics":
        needs = {**self.measured, **other.measured}
        merged: dict[Need, Statistic] = {}
        for need in needs:
            mine, theirs = self.measured.get(need), other.measured.get(need)
            merged[need] = needs[need] if mine is None or theirs is None else _sum(need, mine, theirs)
        return LayerStatistics(
            self.key_rotary, self.value_rotary, self.softmax_scale, self.n_tokens + other.n_tokens, merged
        )


@final
@dataclass(frozen=True)
class Statistics:
    """Statistics of a model's cache layers, by layer index; layers without a cache of their own are absent."""

    model: ModelIdentity
    layers: Mapping[int, LayerStatistics]
    sources: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Calibration tokens that the best-observed layer saw."""
        return max((layer.n_tokens for layer in self.layers.values()), default=0)

    def shape(self, layer: int) -> LayerShape:
        """Shape of one cache layer."""
        return self.model.layers[layer]

    def with_keys_that_turn(self) -> "tuple[Statistics, frozenset[int]]":
        """As a recipe sees the layers: what turns is a key. Also the layers in which the slots were exchanged."""
        mine = frozenset(i for i, layer in self.layers.items() if layer.turns_in_values)
        layers = {i: layer.exchanged() if i in mine else layer for i, layer in self.layers.items()}
        shapes = tuple(shape.exchanged() if i in mine else shape for i, shape in enumerate(self.model.layers))
        return replace(self, model=replace(self.model, layers=shapes), layers=layers), mine

    def beside(self, other: "Statistics") -> "Statistics":
        """More statistics of the same text (`+` takes in another); `other` counts where both hold a need.

        ValueError if they are of different models or texts.
        """
        if reason := self.model.mismatch(other.model):
            raise ValueError(f"statistics of different models do not stand side by side: {reason}")
        if self.sources != other.sources:
            raise ValueError(f"statistics of different texts: {self.sources} and {other.sources}; add them instead")
        layers = {
            i: replace(mine, measured={**mine.measured, **other.layers[i].measured}) if i in other.layers else mine
            for i, mine in self.layers.items()
        }
        return replace(self, layers={**other.layers, **layers})

    def __add__(self, other: "Statistics") -> "Statistics":
        if reason := self.model.mismatch(other.model):
            raise ValueError(f"statistics of different models do not add up: {reason}")
        indices = sorted({*self.layers, *other.layers})
        empty = LayerStatistics()
        layers = {
            i: self.layers[i] + other.layers[i] if i in self.layers and i in other.layers
            else self.layers.get(i) or other.layers.get(i, empty)
            for i in indices
        }  # fmt: skip
        return Statistics(self.model, layers, (*self.sources, *other.sources))


def _sum(need: Need, mine: Statistic, theirs: Statistic) -> Statistic:
    if need.kind in OF_WEIGHTS:
        return mine
    if isinstance(mine, Moments) and isinstance(theirs, Moments):
        return mine + theirs
    if isinstance(mine, Samples) and isinstance(theirs, Samples):
        return mine + theirs
    raise TypeError(f"{need}: {type(mine).__name__} and {type(theirs).__name__} do not add up")
