"""A method is a recipe: a few independent choices for keys, the same choices for values, and one window for both.

frame · metric · transform · allocation · quantizer · packing   for each side,   window   for both
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, final

from karhunen.allocation.base import Allocation
from karhunen.allocation.uniform import Uniform
from karhunen.frames.rope_frame import RopeFrame
from karhunen.metrics.base import Metric
from karhunen.metrics.plain import Plain
from karhunen.packing.base import PackingSpec
from karhunen.packing.bit_fields import FixedWidth
from karhunen.quantizers.affine import Affine
from karhunen.quantizers.base import QuantizerSpec
from karhunen.statistics.need import Need, Slot
from karhunen.transforms.base import TransformSpec
from karhunen.transforms.identity import Identity
from karhunen.values import Kinds, assemble, fingerprint, kinds_in, to_dict
from karhunen.windows.base import Window
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.small_norm import SmallNorm
from karhunen.windows.top_scored import TopScored

SPEC_PACKAGES = tuple(
    f"karhunen.{folder}"
    for folder in ("statistics", "frames", "metrics", "transforms", "allocation", "quantizers", "packing", "windows")
)


@final
@dataclass(frozen=True)
class Side:
    """How one side of the cache, keys or values, is coded. The defaults are the plainest choice of each axis."""

    frame: RopeFrame = RopeFrame()
    metric: Metric = Plain()
    transform: TransformSpec = Identity()
    allocation: Allocation = Uniform(8)
    quantizer: QuantizerSpec = Affine()
    packing: PackingSpec = FixedWidth()

    def needs(self, about: Need) -> frozenset[Need]:
        """The statistics `fit` reads for this side; `about` is `Recipe.about` of it."""
        found = self.metric.needs(about) | self.transform.needs(about)
        if self.transform.needs_moments or self.quantizer.needs_moments or self.allocation.needs_spectrum:
            found |= {about}
        if self.quantizer.needs_samples:
            found |= {replace(about, kind="samples")}
        if self.frame.center:
            found |= {unrotated(about)}
        return found


def unrotated(about: Need) -> Need:
    """The moments of the vectors as they are before rotation, per head."""
    return replace(about, block_tokens=1 if about.slot == "key" else None, joined=False)


@final
@dataclass(frozen=True)
class Recipe:
    """What was asked for. `key` and `value` are both None where no token is coded."""

    name: str
    key: Side | None
    value: Side | None
    window: Window = SinkRecent()

    def __post_init__(self) -> None:
        if (self.key is None) != (self.value is None):
            raise ValueError(f"recipe {self.name!r} codes only one of keys and values; give both sides or neither")
        if self.value is not None and self.value.frame.needs_rotary:
            raise ValueError(f"recipe {self.name!r} gives values a rotary frame; values carry no rotation")
        if isinstance(self.window, TopScored):
            self._check_chosen(self.window)

    def _check_chosen(self, window: TopScored) -> None:
        """Heads keep other tokens each, and what they keep is coded if both the window and the sides say so."""
        if window.coded != (self.key is not None):
            raise ValueError(
                f"recipe {self.name!r}: TopScored(coded={window.coded}) goes {'with' if window.coded else 'without'} a "
                "side for keys and values"
            )
        for side in filter(None, (self.key, self.value)):
            if side.frame.joined or side.frame.needs_rotary or side.frame.center:
                raise ValueError(
                    f"recipe {self.name!r}: with TopScored each head keeps other tokens, and {side.frame} joins heads "
                    "or asks for positions; use a post-RoPE frame per head"
                )

    def side(self, slot: Slot) -> Side | None:
        """The side of the keys or that of the values."""
        return self.key if slot == "key" else self.value

    def needs(self) -> frozenset[Need]:
        """The statistics that calibration has to gather for this recipe."""
        if self.key is None or self.value is None:
            return frozenset()
        found = self.key.needs(self.about("key")) | self.value.needs(self.about("value"))
        if self.window.exceptions is not None:
            found |= {self.norms(self.window.exceptions)}
        return frozenset(map(self.seen_by_window, found))

    def seen_by_window(self, need: Need) -> Need:
        """The need as this recipe's window has it measured: gradients count reads of tokens that have left it; where it
        keeps no recent tokens, those that have left the usual window of 128, as published rows were measured."""
        if need.kind != "gradients" or self.window.recent_tokens is None:
            return need
        return replace(need, near_tokens=self.window.recent_tokens)

    def about(self, slot: Slot) -> Need:
        """The moments of the vectors that one side codes: not of tokens that the window keeps exact."""
        side, rule = self.side(slot), self.window.exceptions
        assert side is not None, "a recipe without sides codes nothing"
        return Need(
            "moments",
            slot,
            side.frame.block_tokens,
            side.frame.joined,
            skip_tokens=self.window.sink_tokens,
            quiet_slot=rule.slot if rule else None,
            quiet_fraction=rule.fraction if rule else 0.0,
        )

    def norms(self, rule: SmallNorm) -> Need:
        """The moments that say how long a vector usually is."""
        return replace(self.about(rule.slot), block_tokens=None, joined=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON; `Recipe.from_dict` is the way back."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Recipe":
        """Strict: an unknown kind or field is refused with the known ones listed (ValueError)."""
        made = assemble(data, recipe_kinds(), {})
        if not isinstance(made, cls):
            raise ValueError(f"this is a {type(made).__name__}, not a Recipe")
        return made

    def fingerprint(self) -> str:
        """Sixteen hex digits that name the choices, whatever the recipe is called."""
        return fingerprint((self.key, self.value, self.window))


@cache
def recipe_kinds() -> Kinds:
    """Every kind of value a recipe may hold, found by folder."""
    return kinds_in(*SPEC_PACKAGES, "karhunen.recipe")
