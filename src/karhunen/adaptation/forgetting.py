"""Statistics of what is served: they forget, and the text of calibration is never forgotten.

    stream    M ← 2^(−n/h) M + Moments of n new vectors, from nothing; h is the half-life
    samples   of C held, C · 2^(−n/h) stay, evenly taken; the newest take the others' places
    today     (k / N) · calibration's moments + M,    all of calibration's samples and the stream's

Calibration counts as k tokens of its N, whatever was served since: a few thousand tokens do not say enough of the next
document, even of one of the same kind.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.calibration.host import on_host, with_float64
from karhunen.calibration.measure import measure
from karhunen.hf.capture import Observation
from karhunen.recipe import Recipe
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need, Statistic
from karhunen.statistics.samples import Samples

HALF_LIFE_TOKENS = 4096
CALIBRATION_TOKENS = 4096
UNSEEN = "only what leaves the exact window is seen here, not the queries that read it"


@final
@dataclass(frozen=True)
class Forgetting:
    """How fast: the number of tokens after which one weighs half; and as how many tokens calibration counts, always."""

    half_life_tokens: int = HALF_LIFE_TOKENS
    calibration_tokens: int = CALIBRATION_TOKENS

    def __post_init__(self) -> None:
        if self.half_life_tokens < 1:
            raise ValueError(f"half_life_tokens={self.half_life_tokens} forgets everything at once; use 1 or more")
        if self.calibration_tokens < 1:
            raise ValueError(
                f"calibration_tokens={self.calibration_tokens} leaves nothing to begin with; use 1 or more, such as "
                f"{CALIBRATION_TOKENS}"
            )

    def begun(self, calibration: Moments, n_tokens: float) -> Moments:
        """Moments of `n_tokens` tokens, as heavy as `calibration_tokens`."""
        return faded(calibration, self.calibration_tokens / n_tokens)

    def share(self, n_new: int) -> float:
        """Of the old weight that is left after `n_new` more tokens."""
        return 2.0 ** (-n_new / self.half_life_tokens)

    def moments(self, old: Moments, new: Moments, n_new: int) -> Moments:
        """Old ones faded, and new ones."""
        return faded(old, self.share(n_new)) + new

    def samples(self, old: Samples, new: Samples, n_new: int, capacity: int) -> Samples:
        """Old ones thinned, and as many of the new ones as fill up, evenly taken."""
        n_old = min(round(capacity * self.share(n_new)), old.vectors.shape[1])
        return _evenly(old, n_old) + _evenly(new, min(capacity - n_old, new.vectors.shape[1]))


def faded(moments: Moments, share: float) -> Moments:
    """The same mean and covariance with `share` of the weight."""
    return Moments(moments.count * share, moments.sum * share, moments.outer * share)


def _evenly(samples: Samples, n: int) -> Samples:
    have = samples.vectors.shape[1]
    if n >= have:
        return samples
    index = torch.arange(n, device=samples.positions.device) * have // max(n, 1)
    return Samples(samples.vectors[:, index], samples.positions[index])


@final
class Stream:
    """What a recipe's axes and codebooks are fitted to, kept up to date; all that takes queries or gradients stays as
    calibration measured it."""

    def __init__(self, recipe: Recipe, calibration: Statistics, forgetting: Forgetting | None = None) -> None:
        self.forgetting = forgetting or Forgetting()
        self.calibration = calibration
        self.needs = tuple(need for need in recipe.needs() if need.kind in ("moments", "samples"))
        if not any(need.kind == "moments" for need in self.needs):
            raise ValueError(f"{recipe.name} fits nothing to the vectors it codes, so there is nothing to adapt")
        for layer in calibration.layers.values():
            for need in self._needs(layer):
                if need not in layer.measured:
                    raise ValueError(f"these statistics do not hold {need}; give those that the codec was fitted to")
        self.n_new: dict[int, int] = {}
        self._weight = dict.fromkeys(calibration.layers, 0.0)
        self._held: dict[int, dict[Need, Statistic]] = {i: {} for i in calibration.layers}

    def add(
        self,
        layer: int,
        key: Float[Tensor, "b h t d"],
        value: Float[Tensor, "b h t e"],
        positions: Int[Tensor, "b t"],
    ) -> None:
        """Tokens that left the exact window; where `positions` are negative there is padding."""
        if layer not in self._held:
            return
        for row in range(key.shape[0]):
            real = positions[row] >= 0
            part = slice(row, row + 1)
            self._add_row(layer, key[part, :, real], value[part, :, real], positions[part, real])

    def _add_row(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> None:
        n = key.shape[2]
        if n == 0:
            return
        known = self.calibration.layers[layer]
        key, value = with_float64(key), with_float64(value)
        positions = positions.to(key.device)
        seen = Observation(layer, key, value, positions, torch.ones_like(positions, dtype=torch.bool), None, UNSEEN)
        held = dict(self._held[layer])
        for need in self._needs(known):
            found = on_host(measure(replace(need, skip_tokens=0), seen, known.rotary(need.slot)))
            held[need] = self._merged(need, known, held[need], found, n) if need in held else found
        self._held[layer] = held
        self._weight[layer] = self._weight[layer] * self.forgetting.share(n) + n
        self.n_new[layer] = self.n_new.get(layer, 0) + n

    def statistics(self) -> Statistics:
        """Of calibration and today's text together, for `karhunen.fit`."""
        layers = {i: self._today(i, layer) for i, layer in self.calibration.layers.items()}
        n = max(self.n_new.values(), default=0)
        said = f"{n} tokens that were served, half-life {self.forgetting.half_life_tokens}"
        return Statistics(self.calibration.model, layers, (*self.calibration.sources, said))

    def _needs(self, layer: LayerStatistics) -> tuple[Need, ...]:
        return tuple(need.exchanged() if layer.turns_in_values else need for need in self.needs)

    def _today(self, i: int, layer: LayerStatistics) -> LayerStatistics:
        if not self._held[i]:
            return layer
        joined = {need: self._joined(layer.measured[need], new, layer.n_tokens) for need, new in self._held[i].items()}
        n = round(self.forgetting.calibration_tokens + self._weight[i])
        return replace(layer, n_tokens=n, measured={**layer.measured, **joined})

    def _joined(self, old: Statistic, new: Statistic, n_tokens: int) -> Statistic:
        if isinstance(old, Moments) and isinstance(new, Moments):
            return self.forgetting.begun(old, max(1, n_tokens)) + new
        assert isinstance(old, Samples) and isinstance(new, Samples), "the needs of a stream are moments and samples"
        return old + new

    def _merged(self, need: Need, known: LayerStatistics, old: Statistic, new: Statistic, n: int) -> Statistic:
        """Of samples as many stay as calibration had."""
        if isinstance(old, Moments) and isinstance(new, Moments):
            return self.forgetting.moments(old, new, n)
        assert isinstance(old, Samples) and isinstance(new, Samples), "the needs of a stream are moments and samples"
        return self.forgetting.samples(old, new, n, known.get(need, Samples).vectors.shape[1])
