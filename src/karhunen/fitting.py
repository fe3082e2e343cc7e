"""Recipe and statistics become a codec:

calibration text ─▶ statistics ─▶ transform ─▶ allocation ─▶ quantizer ─▶ codec

The recipe's side for keys codes what turns with the position. In latent attention that is cached under the name of
values: such a layer is fitted with its slots exchanged, and its codec has them in their places again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import final

import torch
from torch import Tensor

from karhunen.allocation.base import Allocation, RateCost
from karhunen.codec import Codec, LayerCodec, Origin, SideCodec
from karhunen.device import HOST, moved
from karhunen.frames.rope_frame import join_heads
from karhunen.metrics.base import costs_nothing
from karhunen.quantizers.base import QuantizerData
from karhunen.quantizers.embedded import Embedded, EmbeddedQuantizer
from karhunen.recipe import Recipe, Side, unrotated
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS, Need, Slot, other_slot
from karhunen.statistics.samples import Samples
from karhunen.transforms.base import Transform, TransformData
from karhunen.transforms.chain import transformed_moments
from karhunen.values import dismantle, refuse_unless_a
from karhunen.windows.small_norm import NormBelow

Key = tuple[int, Slot]
EXACT_BITS = 16  # of an exact scalar, as budgets count it
EXACT_RESERVE = (
    1.7  # times calibration's share of exact tokens: most texts have more of them; a steady rule keeps as many
)
DROPS = "the recipe drops tokens and codes none: those that are left are exact"
CENTERED_POSITIONS = 4096  # over which the turning mean of a centered post-RoPE frame is averaged


@final
@dataclass(frozen=True)
class _Job:
    """One side of one layer on its way through the stages."""

    side: Side
    slot: Slot
    shape: LayerShape
    statistics: LayerStatistics
    about: Need
    recipe: Recipe
    exchanged: bool = False

    def find(self, need: Need) -> Moments:
        """The moments that the side asks for, as the recipe's window has them measured."""
        return self.statistics.get(self.recipe.seen_by_window(need), Moments)

    @property
    def size(self) -> tuple[int, int]:
        """(g, d) of the vectors that are coded."""
        h = self.shape.n_kv_heads
        d = self.shape.key_dim if self.slot == "key" else self.shape.value_dim
        return (1, h * d) if self.side.frame.joined else (h, d)

    @property
    def cached_as(self) -> Slot:
        """What the model's cache calls the vectors."""
        return other_slot(self.slot) if self.exchanged else self.slot


def fit(recipe: Recipe, statistics: Statistics) -> Codec:
    """The codec of `recipe` for the model that `statistics` describe.

    Sliding-window layers stay exact: their size is bounded. Raises ValueError naming the layer if a statistic is
    missing or zero in every layer, a size does not fit, the recipe's frame needs a rotation that the model does not
    have, or a fitted table would hold NaN or infinity.
    """
    refuse_unless_a("recipe", recipe, Recipe, would="make one with karhunen.make")
    refuse_unless_a("statistics", statistics, Statistics, would="karhunen.calibrate gives them")
    statistics = moved(statistics, HOST)
    left = reasons_left_exact(recipe, statistics.model)
    _refuse_missing_rotation(recipe, statistics)
    turning, exchanged = statistics.with_keys_that_turn()
    jobs: dict[Key, _Job] = {
        (layer, slot): _job(recipe, turning, layer, slot, layer in exchanged)
        for layer in range(len(statistics.model.layers)) if layer not in left
        for slot in SLOTS
    }  # fmt: skip
    for key, job in jobs.items():
        _named(key, _refuse_non_finite, job, job.statistics.measured, "measured")
    notes = _notes(jobs)
    means = {key: _named(key, _frame_mean, job) for key, job in jobs.items()}
    vectors = {key: _moments(job, means[key]) for key, job in jobs.items()}
    transforms = {key: _named(key, _fit_transform, job, vectors[key]) for key, job in jobs.items()}
    moments = {key: transformed_moments(vectors[key], transforms[key]) for key in jobs}
    rates = _base_rates(jobs, moments, {layer: _share_kept_exact(recipe, turning.layers[layer]) for layer, _ in jobs})
    sides = {
        key: _named(key, _fit_side, job, means[key], transforms[key], moments[key], rates[key])
        for key, job in jobs.items()
    }  # fmt: skip
    for index in range(max((len(_layers(job)) for job in jobs.values()), default=0)):
        sides |= _refined({key: job for key, job in jobs.items() if index < len(_layers(job))}, means, sides, index)
    for key, job in jobs.items():
        _named(key, _refuse_non_finite, job, sides[key], "fitted")
    layers = {
        layer: LayerCodec(sides[layer, "key"], sides[layer, "value"], _exceptions(recipe, turning.layers[layer]))
        for layer, slot in jobs if slot == "key"
    }  # fmt: skip
    layers = {i: layer.exchanged() if i in exchanged else layer for i, layer in layers.items()}
    return Codec(statistics.model, recipe.window, layers, left, _origin(recipe, statistics, notes))


def samples_and_variances(recipe: Recipe, statistics: Statistics, layer: int, slot: Slot) -> tuple[Tensor, Tensor]:
    """Calibration vectors of one slot of the cache in the recipe's transform, [g n c], and their variances, [g c]: what
    its quantizer is trained on, for measurements of quantizers. ValueError as in `fit`."""
    turning, exchanged = moved(statistics, HOST).with_keys_that_turn()
    mine = other_slot(slot) if layer in exchanged else slot
    job = _job(recipe, turning, layer, mine, layer in exchanged)
    mean = _frame_mean(job)
    vectors = _moments(job, mean)
    transform = _fit_transform(job, vectors)
    return _samples(job, mean, transform), _spectrum(transformed_moments(vectors, transform), job)


def _notes(jobs: Mapping[Key, _Job]) -> tuple[str, ...]:
    """Where an error costs nothing by what was measured; ValueError if that is so everywhere: no model is like that."""
    found: dict[Key, list[int]] = {}
    wanted: set[Need] = set()
    n_blind = n_groups = 0
    for key, job in jobs.items():
        for need in job.side.metric.needs(job.about) - {job.about}:
            blind = costs_nothing(_named(key, _Job.find, job, need))
            found[key] = blind.nonzero().flatten().tolist()
            n_blind, n_groups = n_blind + int(blind.sum()), n_groups + len(blind)
            wanted.add(job.recipe.seen_by_window(need))
    if n_groups and n_blind == n_groups:
        raise ValueError(
            f"the {'; '.join(sorted(map(str, wanted)))} are zero in every layer, so they do not say where bits go; "
            "calibrate again, on longer texts"
        )
    return tuple(
        f"layer {layer}, {jobs[layer, slot].cached_as}s: an error costs nothing in head group{'s' * (len(groups) > 1)} "
        f"{', '.join(map(str, groups))} (pruned?), which get the fewest bits there are"
        for (layer, slot), groups in found.items() if groups
    )  # fmt: skip


def _refuse_non_finite(_: _Job, value: object, said: str) -> None:
    """ValueError if a tensor holds NaN or infinity: whatever was coded with it would be read as NaN."""
    tensors: dict[str, Tensor] = {}
    dismantle(value, tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise ValueError(
                f"what was {said} holds NaN or infinity ({name}); calibrate on more and longer texts, or use another "
                "recipe"
            )


def _refuse_missing_rotation(recipe: Recipe, statistics: Statistics) -> None:
    """Single layers may go without a rotation; where none has one there is nothing to undo."""
    if len(statistics.layers) < len(statistics.model.layers):
        return  # calibration has looked at the others, too
    turning = any(layer.key_rotary or layer.value_rotary for layer in statistics.layers.values())
    if recipe.key is not None and recipe.key.frame.needs_rotary and not turning:
        raise ValueError(
            f"recipe {recipe.name!r} codes keys relative to their rotation (block_tokens="
            f"{recipe.key.frame.block_tokens}), but no layer of this {statistics.model.architecture} rotates its keys; "
            "use a recipe that codes keys as they are cached, such as nova_kv, kivi or int4"
        )


def reasons_left_exact(recipe: Recipe, model: ModelIdentity) -> dict[int, str]:
    """Layers that are not coded, and why."""
    left: dict[int, str] = {}
    for index, shape in enumerate(model.layers):
        if recipe.key is None:
            left[index] = DROPS if recipe.window.drops else "the recipe codes nothing"
        elif shape.kind == "other":
            left[index] = shape.note or "not an attention cache"
        elif shape.kind == "sliding":
            left[index] = f"sliding window of {shape.window_tokens} tokens: its size does not grow with the context"
    return left


def _job(recipe: Recipe, statistics: Statistics, layer: int, slot: Slot, exchanged: bool) -> _Job:
    side = recipe.side(slot)
    assert side is not None, "a recipe without sides leaves every layer exact"
    if layer not in statistics.layers:
        raise ValueError(f"layer {layer} was never observed during calibration")
    shape, measured = statistics.shape(layer), statistics.layers[layer]
    return _Job(side, slot, shape, measured, recipe.about(slot), recipe, exchanged)


def _exceptions(recipe: Recipe, layer: LayerStatistics) -> NormBelow | None:
    rule = recipe.window.exceptions
    if rule is None:
        return None
    moments = layer.get(recipe.norms(rule), Moments)
    mean_square = moments.second_moment.diagonal(dim1=-2, dim2=-1).sum()
    return rule.fit(float(mean_square.sqrt()), _share_kept_exact(recipe, layer))


def _share_kept_exact(recipe: Recipe, layer: LayerStatistics) -> float:
    """Share of the tokens that the budget lets the window's rule keep exact beside their codes: what calibration saw,
    with a reserve."""
    found = layer.measured.get(recipe.about("key"))
    if recipe.window.exceptions is None or not isinstance(found, Moments) or not layer.n_tokens:
        return 0.0
    return EXACT_RESERVE * max(0.0, 1 - float(found.count.max()) / layer.n_tokens)


def _frame_mean(job: _Job) -> Tensor | None:
    if not job.side.frame.center:
        return None
    return job.statistics.get(unrotated(job.about), Moments).mean.float()


def _fit_transform(job: _Job, moments: Moments | None) -> Transform:
    g, d = job.size
    metric = job.side.metric.matrix(job.about, job.find)
    if job.side.transform.needs_moments:
        job.statistics.get(job.about, Moments)
    n_heads = job.shape.n_kv_heads if job.side.frame.joined else 1
    data = TransformData(g, d, moments, metric, job.about, job.statistics.measured, n_heads)
    return job.side.transform.fit(data)


def _moments(job: _Job, mean: Tensor | None) -> Moments | None:
    """Moments of what the frame gives, if gathered; a centered frame's are those without its mean."""
    found = job.statistics.measured.get(job.about)
    if not isinstance(found, Moments) or mean is None:
        return found if isinstance(found, Moments) else None
    turned = _turned_means(
        job, mean, torch.arange(job.side.frame.block_tokens or CENTERED_POSITIONS, device=mean.device)
    )
    drift = Moments.of(turned)
    count = found.count / drift.count
    return Moments(found.count, torch.zeros_like(found.sum), found.outer - count[:, None, None] * drift.outer)


def _turned_means(job: _Job, mean: Tensor, positions: Tensor) -> Tensor:
    """What a centered frame takes away at each position, [g n e]."""
    frame, rotary = job.side.frame, job.statistics.rotary(job.slot)
    turned = frame.turned_mean(mean.double(), positions[None], rotary).expand(-1, -1, len(positions), -1)
    return (join_heads(turned) if frame.joined else turned)[0]


def _base_rates(
    jobs: Mapping[Key, _Job], moments: Mapping[Key, Moments | None], exact: Mapping[int, float]
) -> dict[Key, Tensor]:
    """Rates of every side. What the share `exact` of a layer's tokens takes beside its codes, and what the window
    stores of a coded token, is paid from the same budget."""
    for job in jobs.values():
        if job.side.allocation.needs_spectrum:
            job.statistics.get(job.about, Moments)
    spectra = {key: _named(key, _finite_spectrum, job, moments[key]) for key, job in jobs.items()}
    costs = {key: _named(key, lambda job: job.side.quantizer.cost(job.size[1]), job) for key, job in jobs.items()}
    costs = {
        key: replace(
            cost,
            token_bits=cost.token_bits
            + EXACT_BITS * exact[key[0]] * jobs[key].size[1]
            + jobs[key].recipe.window.token_bits / (len(SLOTS) * jobs[key].size[0]),
        )
        for key, cost in costs.items()
    }
    return _allocate({key: job.side.allocation for key, job in jobs.items()}, spectra, costs)


def _allocate(
    allocations: Mapping[Key, Allocation], spectra: Mapping[Key, Tensor], costs: Mapping[Key, RateCost]
) -> dict[Key, Tensor]:
    """Sides with an equal allocation share one call, so its scope may be the whole model."""
    rates: dict[Key, Tensor] = {}
    for allocation in set(allocations.values()):
        mine = [key for key in allocations if allocations[key] == allocation]
        rates |= allocation.rates({key: spectra[key] for key in mine}, {key: costs[key] for key in mine})
    return rates


def _layers(job: _Job) -> tuple[Allocation, ...]:
    return job.side.quantizer.layers if isinstance(job.side.quantizer, Embedded) else ()


def _refined(
    jobs: Mapping[Key, _Job], means: Mapping[Key, Tensor | None], sides: Mapping[Key, SideCodec], index: int
) -> dict[Key, SideCodec]:
    """With layer `index` of embedded codes, whose rates are filled over what the layers before it leave. That is found
    twice, so that it never lies in memory of all sides at once."""

    def parts(key: Key) -> tuple[Embedded, EmbeddedQuantizer]:
        spec, fitted = jobs[key].side.quantizer, sides[key].quantizer
        assert isinstance(spec, Embedded) and isinstance(fitted, EmbeddedQuantizer), "only these have layers"
        return spec, fitted

    def rest(key: Key) -> Tensor:
        spec, fitted = parts(key)
        return spec.rest(fitted, _samples(jobs[key], means[key], sides[key].transform))

    spectra = {key: rest(key).double().square().mean(1) for key in jobs}
    costs = {key: jobs[key].side.quantizer.cost(jobs[key].size[1]) for key in jobs}
    rates = _allocate({key: _layers(job)[index] for key, job in jobs.items()}, spectra, costs)
    made: dict[Key, SideCodec] = {}
    for key, job in jobs.items():
        spec, fitted = parts(key)
        quantizer = spec.refined(fitted, QuantizerData(rates[key], None, rest(key)))
        made[key] = replace(sides[key], quantizer=quantizer, layout=job.side.packing.fit(quantizer.widths))
    return made


def _finite_spectrum(job: _Job, moments: Moments | None) -> Tensor:
    """ValueError where numbers near the end of float64 were measured, whose squares are infinite."""
    found = _spectrum(moments, job)
    if not bool(found.isfinite().all()):
        raise ValueError(
            "the variances of its transformed vectors are NaN or infinite, so no bits can be allocated; calibrate again"
        )
    return found


def _spectrum(moments: Moments | None, job: _Job) -> Tensor:
    if moments is None:
        return torch.ones(job.size, dtype=torch.float64, device=HOST)
    return moments.second_moment.diagonal(dim1=-2, dim2=-1)


def _fit_side(
    job: _Job, mean: Tensor | None, transform: Transform, moments: Moments | None, rates: Tensor
) -> SideCodec:
    rotary = job.statistics.rotary(job.slot)
    samples = _samples(job, mean, transform) if job.side.quantizer.needs_samples else None
    quantizer = job.side.quantizer.fit(QuantizerData(rates, moments, samples))
    layout = job.side.packing.fit(quantizer.widths)
    return SideCodec(job.shape.n_kv_heads, job.side.frame, rotary, mean, transform, quantizer, layout)


def _samples(job: _Job, mean: Tensor | None, transform: Transform) -> Tensor:
    """Calibration vectors as the quantizer will see them, [g n c]."""
    raw = job.statistics.get(replace(job.about, kind="samples"), Samples)
    vectors = raw.vectors if mean is None else raw.vectors - _turned_means(job, mean, raw.positions)
    return transform.forward(vectors)


def _named(key: Key, step, job: _Job, *rest):  # type: ignore[no-untyped-def]
    """Runs one stage; a refusal says which layer and side it is about."""
    try:
        return step(job, *rest)
    except ValueError as error:
        raise ValueError(f"layer {key[0]}, {job.cached_as}s: {error}") from error


def _origin(recipe: Recipe, statistics: Statistics, notes: tuple[str, ...]) -> Origin:
    versions: dict[str, str] = {}
    for package in ("karhunen", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return Origin(recipe.name, recipe.fingerprint(), statistics.sources, statistics.n_tokens, versions, notes)
