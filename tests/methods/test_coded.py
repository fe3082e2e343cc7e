"""Methods by what they store, against known numbers: KVQuant, Kitty, float8, OTT, KVTC, Palu, AATC, CommVQ."""

import itertools
import zlib
from dataclasses import replace

import pytest
import torch
from tests.closeness import assert_near
from tests.synthetic import SMALL, WINDOW, cached, codec, quick, rotary, seeded, statistics, vectors
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.allocation.dynamic_programming import DynamicProgramming, knapsack
from karhunen.allocation.leading import Leading
from karhunen.allocation.water_filling import WaterFilling
from karhunen.codec import SideCodec
from karhunen.fitting import fit
from karhunen.metrics.plain import Plain
from karhunen.metrics.relative import Relative
from karhunen.packing.bit_fields import FixedWidth
from karhunen.packing.deflate import Deflate
from karhunen.quantizers.base import QuantizerData
from karhunen.quantizers.boosted import Boosted
from karhunen.quantizers.commuting_vq import CommutingVQ, orbit, turned
from karhunen.quantizers.float8_static import StaticFloat8
from karhunen.quantizers.non_uniform import NonUniform
from karhunen.recipes import make
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.store.layer_store import LayerStore
from karhunen.transforms.base import TransformData
from karhunen.transforms.chain import ChainSpec, transformed_moments
from karhunen.transforms.klt import KLT
from karhunen.transforms.leading_hadamard import LeadingHadamard
from karhunen.transforms.metric_scale import MetricScale
from karhunen.windows.left_out import without


def normal(g: int, n: int, c: int, seed: int = 0) -> Tensor:
    return torch.randn(g, n, c, generator=seeded(seed))


def data(bits: float, samples: Tensor) -> QuantizerData:
    g, _, c = samples.shape
    return QuantizerData(torch.full((g, c), float(bits)), Moments.of(samples), samples)


def side_bits(side: SideCodec, shape: LayerShape, t: int = 128) -> float:
    x = cached(shape, 1, t)[0]
    return 8 * sum(part.nbytes for part in side.encode(x, torch.arange(t)[None]).tensors()) / x.numel()


# KVQuant


def test_one_percent_of_a_vector_is_sparse_and_comes_back_exact() -> None:
    """256 coefficients over two heads: 3 outliers of 16-bit index and float16 value each, 0.375 bit per coefficient."""
    quantizer = NonUniform("channel").fit(data(3, normal(2, 600, 128)))
    x = normal(2, 40, 128, seed=1)[None].half().float()
    x[0, 1, :, 7] = 50.0
    codes = quantizer.encode(x)
    assert codes.side["outlier"].shape == (1, 3, 40)
    side_bits = 8 * sum(tensor.nbytes for tensor in codes.side.values()) / x.numel()
    assert side_bits == 3 * 32 / 256
    back = quantizer.decode(codes)
    assert torch.equal(back[0, 1, :, 7], x[0, 1, :, 7])
    at = codes.side["outlier_at"].long()
    rows = (back - x).transpose(-2, -1).flatten(1, 2)
    assert float(rows.gather(1, at).abs().max()) == 0


@pytest.mark.parametrize("ranges", ["channel", "token"])
def test_levels_of_gaussian_values_are_nearly_lloyd_max_levels(ranges: str) -> None:
    """Max (1960): 0.03454 at 3 bits. Levels learned from 30,000 values, outliers apart, do at least as well."""
    quantizer = NonUniform(ranges).fit(data(3, normal(1, 600, 128)))  # type: ignore[arg-type]
    x = normal(1, 300, 128, seed=1)[None]
    error = float((quantizer.decode(quantizer.encode(x)) - x).square().mean())
    assert 0.8 * 0.03454 < error < 1.02 * 0.03454


def test_without_outliers_a_token_stores_its_symbols_alone() -> None:
    codes = NonUniform("channel", 0.0).fit(data(2, normal(1, 300, 32))).encode(normal(1, 8, 32)[None])
    assert sum(tensor.nbytes for tensor in codes.side.values()) == 0


def test_k_means_in_the_units_of_the_metric_is_the_sensitivity_weighted_one() -> None:
    """Squared error after `MetricScale` is the sum of M_ii times the squared error before it."""
    metric = torch.tensor([[4.0, 0.3], [0.3, 0.25]], dtype=torch.float64)[None]
    scale = MetricScale().fit(TransformData(1, 2, None, metric))
    error = normal(1, 50, 2).double()
    expected = (error.square() * torch.tensor([4.0, 0.25])).sum(-1)
    assert torch.allclose(scale.forward(error).square().sum(-1), expected, rtol=1e-6)


def test_kvquant_keeps_the_first_token_and_codes_keys_before_rope() -> None:
    recipe = make("kvquant")
    assert recipe.window.sink_tokens == 1
    assert recipe.key is not None
    assert recipe.key.frame.block_tokens == 1


# Kitty


def test_boosted_channels_are_those_that_vary_most_and_err_a_fifth() -> None:
    """3 levels' steps against 15: the boosted channels' steps are a fifth, and one channel in eight is boosted."""
    x = normal(1, 32, 16)[None] * torch.ones(16).index_fill(0, torch.tensor([3, 11]), 10.0)
    quantizer = Boosted(32).fit(QuantizerData(torch.full((1, 16), 2.0)))
    codes = quantizer.encode(x)
    assert codes.side["chosen"].flatten().tolist() == [3, 11]
    levels = x.amax(2) - x.amin(2)
    step = codes.side["step"].float().reshape(1, 1, 16)
    expected = levels / torch.full((16,), 3.0).index_fill(0, torch.tensor([3, 11]), 15.0)
    assert torch.allclose(step, expected, rtol=1e-3)
    error = (quantizer.decode(codes) - x).abs().amax(2)
    assert bool((error <= step * 0.51 + 0.01).all())


def test_kitty_takes_two_bits_a_quarter_and_ranges() -> None:
    """Keys: 2 + 2/8, ranges 32/32, an index of 16 bits for each boosted channel and page: 16/8/32."""
    made = codec("kitty", LayerShape("full", 2, 4, 128, 128)).layers[0]
    assert side_bits(made.key, LayerShape("full", 2, 4, 128, 128)) == 2 + 2 / 8 + 32 / 32 + 16 / 8 / 32


# float8


def test_a_calibrated_float8_takes_its_byte_alone_and_saturates() -> None:
    samples = normal(2, 200, 32)
    quantizer = StaticFloat8().fit(data(8, samples))
    x = normal(2, 9, 32, seed=1)[None]
    codes = quantizer.encode(x)
    assert codes.side == {}
    back = quantizer.decode(codes)
    inside = (x.abs() < samples.abs().amax((1, 2))[None, :, None, None]) & (x.abs() > 0.1)
    assert float(((back - x) / x).abs()[inside].max()) <= 2**-4 * 1.01
    top = quantizer.decode(quantizer.encode(x * 1e6)).abs().amax((0, 2, 3))
    assert torch.allclose(top, samples.abs().amax((1, 2)), rtol=1e-5)


# OTT


def test_a_token_left_out_stretches_no_range() -> None:
    y, left_out = normal(1, 64, 8)[None], torch.zeros(1, 64, dtype=torch.bool)
    y[0, 0, 5], y[0, 0, 40] = 100.0, -100.0
    left_out[0, [5, 40]] = True
    calm = without(y, left_out, 32)
    others = [i for i in range(64) if i not in (5, 40)]
    assert torch.equal(calm[:, :, others], y[:, :, others])
    assert torch.equal(calm[0, 0, :32].amax(0), y[0, 0, [i for i in others if i < 32]].amax(0))
    assert torch.equal(without(y, left_out, 1), y), "a token of its own block stretches none but its own"
    assert torch.equal(without(y, torch.ones_like(left_out), 32), y)


def test_ott_keeps_short_keys_exact_and_codes_their_neighbours_as_if_they_were_not_there() -> None:
    key, value = cached(SMALL, 1, 101)
    recipe = make("ott")
    full = fit(recipe, statistics(recipe, SMALL))
    layer = replace(full.layers[0], exceptions=replace(full.layers[0].exceptions, threshold=1e-3))
    key[:, :, 10] *= 1e-6
    value[:, :, 10] = 300.0  # a value token of its own range, and a key that is none of its block's
    with_it, alone = LayerStore(layer, WINDOW), LayerStore(layer, WINDOW)
    with_it.append(key, value)
    assert with_it.exceptions is not None
    assert with_it.exceptions.tokens.tolist() == [10 - 3]
    assert torch.equal(with_it.read()[0][:, :, 10], key[:, :, 10])
    average = key.clone()
    others = [i for i in range(3, 35) if i != 10]
    average[:, :, 10] = key[:, :, others].double().mean(2).float()
    alone.append(average, value)
    assert torch.equal(with_it.read()[0][:, :, others], alone.read()[0][:, :, others])


# KVTC


def test_the_knapsack_finds_what_trying_everything_finds() -> None:
    energy = torch.tensor([5.0, 3.0, 2.0, 0.5, 0.1], dtype=torch.float64)
    widths, overhead = (0, 2, 4, 8), 3
    prices = [tuple(w + overhead * (w > 0) for w in widths)] * 5
    for budget in (0, 5, 11, 17, 26, 60):
        found = knapsack(energy, widths, prices, budget)

        def error(choice: tuple[int, ...] | list[int]) -> float:
            return sum(e * 4.0**-w for e, w in zip(energy.tolist(), choice, strict=True))

        affordable = (
            c for c in itertools.product(widths, repeat=5) if sum(w + overhead * (w > 0) for w in c) <= budget
        )
        assert error(found) == pytest.approx(min(map(error, affordable)))


def test_dynamic_programming_is_at_most_its_menu_worse_than_water_filling() -> None:
    spectrum = {0: torch.logspace(0, -4, 64, dtype=torch.float64)[None]}
    cost = {0: RateCost(group=4, overhead_bits=16.0)}
    rates = {kind: kind(2.0).rates(spectrum, cost)[0] for kind in (DynamicProgramming, WaterFilling)}
    errors = {kind: float((spectrum[0] * 4.0 ** -rates[kind]).sum()) for kind in rates}
    assert set(rates[DynamicProgramming].unique().tolist()) <= {0.0, 2.0, 4.0, 8.0}
    assert errors[DynamicProgramming] < 1.6 * errors[WaterFilling]


def test_a_budget_that_buys_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for a single group of 4 coefficients"):
        DynamicProgramming(0.1).rates({0: torch.ones(1, 16)}, {0: RateCost(group=4, overhead_bits=32.0)})


def test_deflated_pages_come_back_and_are_as_small_as_zlib_makes_them() -> None:
    layout = Deflate(32).fit((2,) * 64)
    symbols = (torch.rand(2, 64, 96, generator=seeded(0)) ** 6 * 4).int()  # mostly zeros
    planes = layout.pack(symbols)
    page = planes[0, :, :32]
    small = layout.pages.shrink(page)
    assert torch.equal(layout.pages.grow(small), page)
    assert zlib.decompress(small, -15) == page.contiguous().numpy().tobytes()
    assert len(small) < 0.7 * page.numel()


def test_kvtcs_bytes_in_the_store_are_the_deflated_ones() -> None:
    recipe = quick(make("kvtc"))
    assert recipe.key is not None and recipe.value is not None
    plain = replace(
        recipe,
        key=replace(recipe.key, packing=FixedWidth()),
        value=replace(recipe.value, packing=FixedWidth()),
    )
    key, value = cached(SMALL, 2, 300)
    stores = []
    for made in (fit(r, statistics(r, SMALL)) for r in (recipe, plain)):
        stores.append(LayerStore(made.layers[0], made.window))
        stores[-1].append(key, value)
    assert stores[0].n_coded == 256
    assert all(torch.equal(a[:, :, :259], b[:, :, :259]) for a, b in zip(*(s.read() for s in stores), strict=True))
    deflated, fixed = (s.account().codes for s in stores)
    records = sum(s.numel() for name, s in stores[0].tensors().items() if name.endswith("planes"))
    assert deflated == records != fixed


# Palu and AATC


def test_palus_latent_holds_the_energy_of_its_rank_evenly() -> None:
    """Behind KLT and Hadamard the r kept coefficients have equal second moments, in sum the r largest eigenvalues."""
    moments = Moments.of(vectors(1, 1, 500, 64)[0])
    chain = ChainSpec((KLT(center=False), LeadingHadamard(0.25))).fit(TransformData(1, 64, moments))
    after = transformed_moments(moments, chain)
    assert after is not None
    energy = after.second_moment.diagonal(dim1=-2, dim2=-1)[0]
    largest = torch.linalg.eigvalsh(moments.second_moment[0]).flip(0)
    assert torch.allclose(energy[:16], largest[:16].mean().expand(16), rtol=1e-5)
    assert_near(energy[16:], largest[16:], 1e-6)


def test_a_rank_cut_keeps_whole_groups() -> None:
    spectrum = {0: torch.ones(1, 64)}
    assert Leading(3, 0.5).rates(spectrum, {0: RateCost(group=32)})[0].tolist() == [[3.0] * 32 + [0.0] * 32]
    assert int((Leading(3, 0.51).rates(spectrum, {0: RateCost(group=32)})[0] > 0).sum()) == 64


def test_palu_takes_half_of_three_bits_and_the_ranges_of_that_half() -> None:
    shape = LayerShape("full", 2, 4, 64, 64)
    assert side_bits(codec("palu", shape).layers[0].key, shape) == (3 + 32 / 32) / 2


def test_aatc_spends_one_budget_over_keys_and_values_of_all_layers() -> None:
    recipe = quick(make("aatc:bits=3"))
    made = fit(recipe, statistics(recipe, SMALL, replace(SMALL, key_dim=64)))
    sides = [layer.side(slot) for layer in made.layers.values() for slot in ("key", "value")]
    stored = [sum(side.quantizer.widths) + 32 * (len(side.quantizer.widths) // 32) for side in sides]
    n = 2 * (32 + 32 + 64 + 32)
    assert 3 * n - 32 < sum(stored) <= 3 * n
    assert len(set(stored)) > 1, "each side on its own would get the same rate"


def test_a_relative_metric_costs_one_for_coding_nothing() -> None:
    moments = Moments.of(normal(2, 500, 8).double() * torch.arange(1, 9))
    for inner, about in ((Plain(), Need("moments", "key")), (Relative(Plain()), Need("moments", "value"))):
        metric = Relative(inner).matrix(about, lambda _: moments)
        assert float((metric * moments.covariance).sum()) == pytest.approx(1)


def test_a_relative_metric_does_not_know_units() -> None:
    x, about = normal(1, 500, 8).double(), Need("moments", "key")
    small, large = (Relative(Plain()).matrix(about, lambda _, k=k: Moments.of(k * x)) for k in (1.0, 1000.0))
    torch.testing.assert_close(large * 1e6, small)


# CommVQ


def test_quarter_turns_commute_with_the_rotation() -> None:
    x, at = normal(1, 20, 16).double(), torch.arange(20)[None]
    one = torch.ones(1, 20, dtype=torch.int64)
    turn = rotary(16)
    assert torch.allclose(turned(turn.rotate(x, at), one), turn.rotate(turned(x, one), at))
    assert torch.equal(turned(turned(x, one), 3 * one), x)


def test_a_commuting_codebook_is_mapped_onto_itself_by_a_quarter_turn() -> None:
    quantizer = replace(CommutingVQ(pairs=4, gain="none"), n_iterations=3).fit(data(1, normal(1, 300, 16)))
    for plane in range(len(quantizer.widths)):
        table = quantizer.table(plane)
        assert table.shape == (256, 8)
        again = turned(table, torch.ones(256, dtype=torch.int64))
        assert torch.equal(again, table.roll(-64, 0))
    assert torch.equal(orbit(table[None, :64]), table[None])


def test_a_commuting_codebook_serves_gaussian_pairs_nearly_as_well_as_a_free_one() -> None:
    """8 coefficients in 256 entries, 1 bit each: the bound is 0.25; a free codebook reaches about 0.33."""
    quantizer = CommutingVQ(pairs=4, gain="none", n_iterations=15).fit(data(1, normal(1, 8000, 8)))
    x = normal(1, 2000, 8, seed=1)[None]
    error = float((quantizer.decode(quantizer.encode(x)) - x).square().mean())
    assert 0.25 < error < 0.38
