"""Laws of every part, found by folder: transforms, quantizers, layouts, allocations, windows, metrics.

A new kind is held to them with no list edited, as long as it can be made without arguments; one that cannot gets an
example here.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.closeness import DOUBLE, assert_near
from tests.synthetic import measure, seeded, vectors
from torch import Tensor

from karhunen.allocation.base import Allocation, RateCost
from karhunen.allocation.uniform import Uniform
from karhunen.allocation.water_filling import WaterFilling
from karhunen.frames.rope_frame import join_heads
from karhunen.metrics.base import Metric
from karhunen.metrics.output import OutputMetric
from karhunen.metrics.query import QueryMetric
from karhunen.metrics.relative import Relative
from karhunen.packing.base import PackingSpec
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.recipe import recipe_kinds
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.statistics.samples import Samples
from karhunen.transforms.base import Transform, TransformData, TransformSpec
from karhunen.transforms.chain import ChainSpec
from karhunen.transforms.klt import KLT
from karhunen.transforms.rotations import Hadamard
from karhunen.values import assemble, fingerprint, to_dict
from karhunen.windows.base import Window
from karhunen.windows.partition import Partition, Place
from karhunen.windows.refining import Refining
from karhunen.windows.sink_recent import SinkRecent

EXAMPLES: dict[str, Any] = {
    "ChainSpec": ChainSpec((Hadamard(), KLT())),
    "Embedded": {"inner": ByteVQ(), "layers": (WaterFilling(1.0),)},
    "Refining": Refining(SinkRecent(4, 64), 2, 0.5),
    "Relative": Relative(QueryMetric()),
    "Uniform": Uniform(3),
    "WaterFilling": {"bits": 3.0},
}

G, C, N = 2, 32, 300


def made(base: type) -> dict[str, Any]:
    """One instance of every kind of `base` there is."""
    found = {}
    for name, kind in recipe_kinds().items():
        if issubclass(kind, base):
            example = EXAMPLES.get(name, {})
            found[name] = kind(**example) if isinstance(example, dict) else example
    assert found, f"no {base.__name__} found"
    return found


TRANSFORMS, QUANTIZERS, PACKINGS = made(TransformSpec), made(QuantizerSpec), made(PackingSpec)
ALLOCATIONS, WINDOWS, METRICS = made(Allocation), made(Window), made(Metric)


def coefficients(b: int = 1, t: int = N, seed: int = 0) -> Tensor:
    return vectors(b, G, t, C, seed)


def positive_definite(seed: int, g: int, d: int) -> Tensor:
    root = torch.randn(g, d, 2 * d, generator=seeded(seed), dtype=torch.float64)
    return root @ root.mT / (2 * d)


# Of what a transform may be: keys or values of each head, or keys before RoPE with the heads side by side.
ABOUTS = (Need("moments", "key"), Need("moments", "value"), Need("moments", "key", 1, joined=True))


def transform(name: str, weighted: bool = False) -> tuple[Transform, bool]:
    """Fitted to the first kind of vectors that this transform takes, and whether heads are joined in them."""
    spec, shape, refusals = TRANSFORMS[name], LayerShape("full", G, G, C, C), []
    for about in ABOUTS:
        x = coefficients()
        g, d, n_heads = (1, G * C, G) if about.joined else (G, C, 1)
        moments = Moments.of((join_heads(x) if about.joined else x)[0])
        metric = positive_definite(2, g, d) if weighted else None
        try:
            measured = {need: measure(need, shape, x, x, None) for need in spec.needs(about)}
            return spec.fit(TransformData(g, d, moments, metric, about, measured, n_heads)), about.joined
        except ValueError as error:
            refusals.append(str(error))
    raise AssertionError(f"{name} takes no vectors: {refusals}")


def vectors_for(joined: bool, b: int, t: int, seed: int) -> Tensor:
    x = coefficients(b, t, seed).double()
    return join_heads(x) if joined else x


def quantizer(name: str) -> Quantizer:
    """At the lowest of a few rates that this kind can code."""
    x, spec = coefficients()[0], QUANTIZERS[name]
    spec = replace(spec, n_iterations=1) if hasattr(spec, "n_iterations") else spec
    refusals = []
    for bits in (2.0, 4.0, 8.0):
        try:
            return spec.fit(QuantizerData(torch.full((G, C), bits), Moments.of(x), x))
        except ValueError as error:
            refusals.append(str(error))
    raise AssertionError(f"{name} codes at no rate: {refusals}")


EVERYTHING = {**TRANSFORMS, **QUANTIZERS, **PACKINGS, **ALLOCATIONS, **WINDOWS, **METRICS}


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_kind_made_of_its_own_description_is_the_same(name: str) -> None:
    value = EVERYTHING[name]
    data = to_dict(value)
    assert assemble(data, recipe_kinds(), {}) == value
    assert fingerprint(value) == fingerprint(assemble(data, recipe_kinds(), {}))
    with pytest.raises(ValueError, match=rf"unknown {name} field\(s\) \['colour'\]; known: \["):
        assemble({**data, "colour": 1}, recipe_kinds(), {})


# transforms


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "metric"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_inverse_undoes_the_transform(name: str, weighted: bool) -> None:
    fitted, joined = transform(name, weighted)
    x = vectors_for(joined, b=3, t=17, seed=5)
    back = fitted.inverse(fitted.forward(x).double())
    assert (back - x).abs().max() <= 2e-5 * x.abs().max()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_affine_and_acts_on_each_token_alone(name: str) -> None:
    fitted, joined = transform(name)
    x, z = (vectors_for(joined, b=1, t=9, seed=seed) for seed in (5, 6))
    middle = fitted.forward((x + z) / 2)
    assert_near(middle, (fitted.forward(x) + fitted.forward(z)) / 2, DOUBLE)
    assert_near(fitted.forward(x)[:, :, 3:4], fitted.forward(x[:, :, 3:4]), DOUBLE)


# quantizers


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_symbol_fits_its_width(name: str) -> None:
    made_of, x = quantizer(name), coefficients(b=2, t=64, seed=5)
    for scale in (1.0, 1e-6, 1e3, 0.0):
        symbols = made_of.encode(x * scale).symbols
        limit = torch.tensor([1 << width for width in made_of.widths])[:, None]
        assert symbols.shape == (2, len(made_of.widths), 64)
        assert bool(((symbols >= 0) & (symbols < limit)).all())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_time_is_the_last_axis_of_all_that_is_stored(name: str) -> None:
    """So blocks can be cut and joined: the codes of two halves, end to end, are the codes of the whole."""
    made_of, x = quantizer(name), coefficients(b=2, t=128, seed=5)
    whole, halves = made_of.encode(x), [made_of.encode(x[:, :, :64]), made_of.encode(x[:, :, 64:])]
    assert torch.equal(whole.symbols, torch.cat([half.symbols for half in halves], dim=-1))
    for side, tensor in whole.side.items():
        assert torch.equal(tensor, torch.cat([half.side[side] for half in halves], dim=-1)), side
        assert 128 % tensor.shape[-1] == 0


UNBIASED = {"ResidualSign"}  # its reconstruction is right on average, and further away than a nearest point


@pytest.mark.parametrize("name", sorted(QUANTIZERS.keys() - UNBIASED))
def test_decoding_what_was_decoded_changes_little(name: str) -> None:
    """A reconstruction is nearer to a code point than what it was made of."""
    made_of, x = quantizer(name), coefficients(t=64, seed=5)
    once = made_of.decode(made_of.encode(x))
    twice = made_of.decode(made_of.encode(once))
    assert once.dtype == torch.float32
    assert once.shape == x.shape
    assert (twice - once).norm() <= 0.7 * (once - x).norm()
    assert torch.equal(once, made_of.decode(made_of.encode(x)))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_awkward_vectors_stay_finite(name: str) -> None:
    """Zeros of either sign, equal entries, denormals, an entry of 1e5, and nothing at all."""
    made_of = quantizer(name)
    n = 32 * made_of.granule_tokens
    x = coefficients(t=n, seed=5)
    x[:, :, 0], x[:, :, 1], x[:, :, 2], x[:, :, 3] = 0.0, -0.0, 1.0, 1e-40
    x[:, :, 4, 7] = 1e5
    x[:, :, 5] = torch.tensor([1.0, -1.0]).repeat(C // 2)
    back = made_of.decode(made_of.encode(x))
    assert torch.isfinite(back).all()
    if made_of.granule_tokens == 1:
        assert back[:, :, :2].abs().max() <= x[:, :, 6:].abs().max(), "zeros stay small"
    empty = made_of.encode(x[:, :, :0])
    assert made_of.decode(empty).shape == (1, G, 0, C)


# layouts


@pytest.mark.parametrize("widths", [(3,) * 8, (8, 8), (1, 2, 3, 4, 5, 6, 7, 8), (9, 1, 16, 7), (5,), ()])
@pytest.mark.parametrize("name", PACKINGS)
def test_unpacking_undoes_packing(name: str, widths: tuple[int, ...]) -> None:
    layout = PACKINGS[name].fit(widths)
    generator = seeded(0)
    symbols = torch.stack([torch.randint(0, 1 << w, (2, 9), generator=generator) for w in widths] or [torch.empty(0)])
    symbols = symbols.transpose(0, 1).int() if widths else torch.empty(2, 0, 9, dtype=torch.int32)
    packed = layout.pack(symbols)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, layout.bytes_per_token, 9)
    assert torch.equal(layout.unpack(packed), symbols)


@pytest.mark.parametrize("name", PACKINGS)
def test_a_symbol_that_does_not_fit_is_refused(name: str) -> None:
    layout = PACKINGS[name].fit((3, 3))
    for wrong in (8, -1):
        with pytest.raises(ValueError, match="does not fit its bit field"):
            layout.pack(torch.tensor([[[1], [wrong]]], dtype=torch.int32))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_a_quantizer_makes_goes_through_every_layout(name: str) -> None:
    made_of, x = quantizer(name), coefficients(t=64, seed=5)
    codes = made_of.encode(x)
    for packing in PACKINGS.values():
        layout = packing.fit(made_of.widths)
        again = Codes(layout.unpack(layout.pack(codes.symbols)), codes.side)
        assert torch.equal(made_of.decode(again), made_of.decode(codes))


# allocations


def spectra(n_layers: int = 3) -> dict[int, Tensor]:
    generator = seeded(4)
    return {i: torch.rand(G, C, generator=generator).double() ** 4 * 10.0 ** (i - 1) + 1e-9 for i in range(n_layers)}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_rates_are_as_many_as_coefficients_and_within_bounds(name: str) -> None:
    cost = RateCost(group=4, overhead_bits=0.0)
    rates = ALLOCATIONS[name].rates(spectra(), dict.fromkeys(spectra(), cost))
    for key, spectrum in spectra().items():
        assert rates[key].shape == spectrum.shape
        assert bool(((rates[key] >= 0) & (rates[key] <= cost.max_bits)).all())
        assert torch.equal(rates[key], rates[key].round()), "integers where the cost asks for them"
        groups = rates[key].unflatten(-1, (-1, 4))
        assert torch.equal(groups, groups[..., :1].expand_as(groups)), "one width per group"


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_a_budget_is_spent_exactly(name: str, scope: str) -> None:
    allocation = ALLOCATIONS[name]
    allocation = replace(allocation, scope=scope) if hasattr(allocation, "scope") else allocation
    rates = allocation.rates(spectra(), dict.fromkeys(spectra(), RateCost()))
    parts = {"head": [r for rate in rates.values() for r in rate], "layer": rates.values(), "model": [rates]}[scope]
    for part in parts:
        flat = torch.cat([r.flatten() for r in part.values()]) if isinstance(part, dict) else part.flatten()
        assert float(flat.sum()) == allocation.bits * flat.numel()


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_an_allocation_does_not_depend_on_the_unit_of_variance(name: str) -> None:
    cost = dict.fromkeys(spectra(), RateCost(group=4, overhead_bits=8.0))
    plain = ALLOCATIONS[name].rates(spectra(), cost)
    scaled = ALLOCATIONS[name].rates({k: 1024.0 * v for k, v in spectra().items()}, cost)
    assert all(torch.equal(plain[key], scaled[key]) for key in plain)


# windows


@pytest.mark.parametrize("name", WINDOWS)
def test_a_partition_covers_every_token_once(name: str) -> None:
    for n in range(300):
        parts = WINDOWS[name].partition(n, 1)
        assert sum(parts.count(place) for place in Place) == parts.n_tokens == n


@pytest.mark.parametrize("runs", [[(0, 3), (4, 5)], [(0, 3), (2, 5)], [(1, 3)], [(0, 3), (3, 2)]])
def test_a_partition_with_a_gap_or_an_overlap_is_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"do not cover the tokens once|not at 0"):
        Partition(tuple((Place.EXACT, start, stop) for start, stop in runs))


# metrics


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_symmetric_and_positive_definite(name: str) -> None:
    metric = METRICS[name]
    about = Need("moments", "value" if isinstance(metric, OutputMetric) else "key")
    needed = {need: Moments.of(torch.randn(G, 5, C, generator=seeded(1))) for need in metric.needs(about)}
    matrix = metric.matrix(about, lambda need: needed[need])
    if matrix is None:
        assert not needed, "the identity asks for nothing"
        return
    assert torch.allclose(matrix, matrix.mT)
    assert bool((torch.linalg.eigvalsh(matrix) > 0).all()), "also where five samples span five directions only"


# statistics


def test_moments_of_two_texts_add_up_to_those_of_both() -> None:
    a, b = coefficients(t=40)[0], coefficients(t=9, seed=1)[0]
    weight = torch.rand(G, 49, generator=seeded(2))
    both = Moments.of(torch.cat([a, b], dim=1), weight)
    parts = Moments.of(a, weight[:, :40]) + Moments.of(b, weight[:, 40:])
    for field in ("count", "sum", "outer"):
        assert torch.allclose(getattr(both, field), getattr(parts, field), rtol=1e-12)
    assert torch.allclose(both.mean, (weight[..., None].double() * torch.cat([a, b], 1)).sum(1) / both.count[:, None])


def test_samples_of_two_texts_are_those_of_both() -> None:
    a, b = coefficients(t=40)[0], coefficients(t=8, seed=1)[0]
    both, parts = Samples.of(torch.cat([a, b], dim=1), 4), Samples.of(a, 4) + Samples.of(b, 4)
    assert torch.equal(both.vectors, parts.vectors)
    assert parts.positions.tolist() == [*range(0, 40, 4), 0, 4], "positions are those within each text"


def test_statistics_add_up_and_those_of_different_models_do_not() -> None:
    model = ModelIdentity("a", "c", "w", (LayerShape("full", G, G, C, C),))
    need = Need("moments", "key")
    a, b = coefficients(t=40)[0], coefficients(t=9, seed=1)[0]
    one, other = (
        Statistics(model, {0: LayerStatistics(n_tokens=x.shape[1], measured={need: Moments.of(x)})}, (name,))
        for x, name in ((a, "a"), (b, "b"))
    )
    both = one + other
    assert both.n_tokens == 49
    assert both.sources == ("a", "b")
    expected = Moments.of(torch.cat([a, b], dim=1)).outer
    assert torch.allclose(both.layers[0].get(need, Moments).outer, expected, rtol=1e-12)
    with pytest.raises(ValueError, match="different models do not add up: it was made for a a, this model is a b"):
        one + replace(other, model=replace(model, architecture="b"))
