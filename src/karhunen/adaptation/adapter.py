"""Keeps a codec fitted to what is served: watches caches, says how far it drifted, fits a new one for new caches.

    cache ── tokens that leave the window ──▶ Stream ──▶ statistics of today ──▶ fit ──▶ codec of the next epoch
                                          └─▶ coefficients in the codec of now ──▶ drift

What is adapted are axes, bit plan and codebooks, in the metric that calibration stored: serving has no gradients. A
cache keeps the codec it began with, and no token is ever coded again: an epoch begins with the next cache. Stored pages
and sessions name their codec by its fingerprint, so those of an older epoch are read with the codec of that epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.adaptation.drift import Drift, drift_of
from karhunen.adaptation.forgetting import Forgetting, Stream
from karhunen.calibration.host import on_host
from karhunen.codec import Codec, SideCodec
from karhunen.device import HOST
from karhunen.fitting import fit, samples_and_variances
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.recipe import Recipe
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS, Slot
from karhunen.store.layer_store import LayerStore
from karhunen.store.observer import Leaving

Key = tuple[int, Slot]
THRESHOLD = 1.05
GROUP_TOKENS = 256  # looked at together: sums of few tokens cost more than they say


@runtime_checkable
class Watched(Protocol):
    """A layer of a cache."""

    store: LayerStore


@runtime_checkable
class WatchedCache(Protocol):
    """A cache whose layers hold stores, such as `karhunen.CompressedCache`."""

    codec: Codec

    def coded_layers(self) -> Iterable[Watched]:
        """In the order of `codec.windowed`."""
        ...


@final
class Adapter:
    """One model's codec over time. `statistics` are those that the first codec was fitted to; `threshold` is the drift
    above which `adapt` fits a new one.

    Not safe for several threads at once: caches that are filled side by side need an adapter behind a lock.
    """

    def __init__(
        self,
        recipe: Recipe,
        statistics: Statistics,
        *,
        forgetting: Forgetting | None = None,
        threshold: float = THRESHOLD,
    ) -> None:
        if not threshold >= 1:
            raise ValueError(f"threshold={threshold} is below any drift; use 1 or more, such as {THRESHOLD}")
        self.recipe, self.threshold = recipe, threshold
        self.stream = Stream(recipe, statistics, forgetting)
        self.epochs: list[Codec] = []
        self._begin(fit(recipe, statistics), statistics)

    @property
    def codec(self) -> Codec:
        """The newest, for new caches."""
        return self.epochs[-1]

    @property
    def epoch(self) -> int:
        """How many codecs came before it."""
        return len(self.epochs) - 1

    def codec_of(self, fingerprint: str) -> Codec:
        """The codec of an older epoch, by the fingerprint that its pages and sessions carry; ValueError if none has
        it."""
        for codec in self.epochs:
            if codec.fingerprint() == fingerprint:
                return codec
        raise ValueError(f"none of {len(self.epochs)} epochs has the codec {fingerprint}")

    def watch(self, cache: WatchedCache) -> None:
        """Learn from the tokens that this cache codes from now on. It may be of any epoch."""
        for index, layer in zip(cache.codec.windowed, cache.coded_layers(), strict=True):
            layer.store.observers = (*layer.store.observers, _Watching(self, index))

    def add(
        self,
        layer: int,
        key: Float[Tensor, "b h t d"],
        value: Float[Tensor, "b h t e"],
        positions: Int[Tensor, "b t"],
    ) -> None:
        """Tokens of one layer as they are cached, at their positions, negative for padding."""
        self.stream.add(layer, key, value, positions)
        for slot, x in zip(SLOTS, (key, value), strict=True):
            if (side := self._sides.get((layer, slot))) is not None:
                side.add(x, positions, self.stream.forgetting)

    def drift(self) -> dict[Key, Drift]:
        """Of every layer and side of the newest codec, by head group."""
        return {key: side.drift() for key, side in self._sides.items()}

    def total_drift(self) -> float:
        """Of the whole model: costs are in one unit where the recipe's metric is (nats, for `karhunen`)."""
        return Drift.together(self.drift().values())

    def adapt(self) -> Codec | None:
        """A new codec if the drift is above the threshold, else None."""
        return self.refit() if self.total_drift() > self.threshold else None

    def refit(self) -> Codec:
        """Fit transform, plan and codebooks to today's statistics: the next epoch."""
        today = self.stream.statistics()
        self._begin(fit(self.recipe, today), today)
        return self.codec

    def _begin(self, codec: Codec, statistics: Statistics) -> None:
        self.epochs.append(codec)
        self._sides: dict[Key, _Side] = {}
        for layer, coded in codec.layers.items():
            for slot in SLOTS:
                samples, variances = samples_and_variances(self.recipe, statistics, layer, slot)
                begun = self.stream.forgetting.begun(Moments.of(samples), samples.shape[1])
                self._sides[layer, slot] = _Side(coded.side(slot), variances, begun)


@final
@dataclass
class _Side:
    """One side of a layer in the newest codec: what its plan was made for, and what comes now."""

    codec: SideCodec
    design: Tensor
    begun: Moments
    new: Moments | None = None

    def add(self, x: Tensor, positions: Tensor, forgetting: Forgetting) -> None:
        frame, codec = self.codec.frame, self.codec
        for row in range(x.shape[0]):
            real = positions[row] >= 0
            if not (n := int(real.sum())):
                continue
            mine, where = x[row : row + 1, :, real].to(HOST), positions[row : row + 1, real].to(HOST)
            y = codec.transform.forward(frame.forward(mine, where, codec.rotary, codec.mean))
            found = on_host(Moments.of(y[0]))
            self.new = found if self.new is None else forgetting.moments(self.new, found, n)

    def drift(self) -> Drift:
        today = self.begun if self.new is None else self.begun + self.new
        return drift_of(self.design, today, bits_of(self.codec, len(self.design)))


def bits_of(codec: SideCodec, g: int) -> Float[Tensor, " _"]:
    """Bits of one token that each head group's codes take."""
    if isinstance(codec.quantizer, ByteQuantizer):
        n_planes = codec.quantizer.plane_group.cpu().bincount(minlength=g)
        return 8.0 * n_planes.double()
    return torch.full((g,), sum(codec.quantizer.widths) / g, dtype=torch.float64, device=HOST)


@final
class _Watching:
    """Hands what leaves one layer on, in groups."""

    def __init__(self, adapter: Adapter, layer: int) -> None:
        self.adapter, self.layer = adapter, layer
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> "_Watching":
        return self

    def left(self, leaving: Leaving) -> None:
        """Waits for enough tokens."""
        self.waiting.append((leaving.key.clone(), leaving.value.clone(), leaving.positions.clone()))
        if sum(key.shape[2] for key, _, _ in self.waiting) >= GROUP_TOKENS:
            key, value, positions = zip(*self.waiting, strict=True)
            self.waiting = []
            self.adapter.add(self.layer, torch.cat(key, 2), torch.cat(value, 2), torch.cat(positions, 1))
