"""Closed forms of quantization: what a bit is worth, and what no input may break."""

import math
from itertools import pairwise

import pytest
import torch
from tests.closeness import LAYERS, assert_near
from tests.synthetic import seeded
from torch import Tensor

from karhunen.packing.bit_fields import FixedWidth
from karhunen.quantizers.affine import Affine, PerChannel, PerToken
from karhunen.quantizers.base import Quantizer, QuantizerData
from karhunen.quantizers.byte_vq import ByteVQ, cut_into_bytes
from karhunen.quantizers.float8 import Float8
from karhunen.quantizers.gains import gain_values, split_gain
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.quantizers.kmeans import kmeans, nearest
from karhunen.quantizers.lloyd_max import LloydMax, gaussian_levels
from karhunen.statistics.moments import Moments

HEAD_DIMS = [16, 32, 64, 80, 96, 112, 128, 192, 256, 512, 576]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def rates(bits: float, g: int, c: int) -> QuantizerData:
    return QuantizerData(torch.full((g, c), float(bits)))


def through(quantizer: Quantizer, x: Tensor) -> Tensor:
    """decode(unpack(pack(encode(x))))."""
    codes = quantizer.encode(x)
    layout = FixedWidth().fit(quantizer.widths)
    assert torch.equal(layout.unpack(layout.pack(codes.symbols)), codes.symbols)
    return quantizer.decode(codes)


def bits_per_element(quantizer: Quantizer, x: Tensor) -> float:
    codes = quantizer.encode(x)
    packed = FixedWidth().fit(quantizer.widths).pack(codes.symbols)
    return 8 * (packed.nbytes + sum(t.nbytes for t in codes.side.values())) / x.numel()


# uniform


def test_a_uniform_quantizer_gains_six_db_per_bit() -> None:
    x = torch.rand(1, 1, 64, 512, generator=seeded(0))
    snr = []
    for bits in (4, 5, 6, 7):
        error = through(Affine().fit(rates(bits, 1, 512)), x) - x
        snr.append(10 * math.log10(x.var() / error.square().mean()))
    gains = [b - a for a, b in pairwise(snr)]
    # the ends of the range are points too, so 2^w − 1 steps: the gain tends to 20 log10 2 from above
    for bits, gain in zip((4, 5, 6), gains, strict=True):
        assert gain == pytest.approx(20 * math.log10((2 ** (bits + 1) - 1) / (2**bits - 1)), abs=0.1)
    assert gains[-1] == pytest.approx(6.02, abs=0.15)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_an_affine_error_is_at_most_half_a_step(bits: int, d: int) -> None:
    """Every width at every head size, through packing and back."""
    x = normal(1, 2, 5, d)
    back = through(Affine(PerToken(64), fit_group=True).fit(rates(bits, 2, d)), x)
    group = max(k for k in range(1, 65) if d % k == 0)
    groups = x.unflatten(-1, (-1, group))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (back - x).unflatten(-1, (-1, group)).abs().amax(-1)
    assert bool((error <= step * (0.5 + 2**bits * 2**-11) + 2**-10 * groups.abs().amax(-1)).all())


@pytest.mark.parametrize("bits", range(1, 9))
def test_lowest_and_highest_value_meet_the_lowest_and_highest_symbol(bits: int) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 4.0])[None, None, None]
    codes = Affine().fit(rates(bits, 1, 4)).encode(x)
    assert codes.symbols[0, 0, 0] == 0
    assert codes.symbols[0, 3, 0] == 2**bits - 1


def test_int4_by_groups_of_64_takes_four_and_a_half_bits() -> None:
    assert bits_per_element(Affine(PerToken(64)).fit(rates(4, 2, 128)), normal(1, 2, 10, 128)) == 4.5


def test_kivi_takes_three_bits_at_groups_of_32() -> None:
    """2 bits, and two float16 numbers for 32 values: of a channel over 32 tokens, or of 32 channels of a token."""
    x = normal(1, 2, 64, 128)
    assert bits_per_element(Affine(PerChannel(32)).fit(rates(2, 2, 128)), x) == 3.0
    assert bits_per_element(Affine(PerToken(32)).fit(rates(2, 2, 128)), x) == 3.0
    assert bits_per_element(Affine(PerToken(128)).fit(rates(2, 2, 128)), x) == 2.25


def test_a_channel_of_its_own_scale_is_cheap_per_channel_and_dear_per_token() -> None:
    """KIVI's reason: an outlier channel spoils the range of every token, but only its own channel's range."""
    x = normal(1, 1, 64, 32)
    x[..., 5] *= 100
    others = [i for i in range(32) if i != 5]
    channel, token = (
        (through(Affine(kind).fit(rates(2, 1, 32)), x) - x)[..., others].norm() for kind in (PerChannel(32), PerToken())
    )
    assert channel < token / 4


def test_clipping_gives_up_the_outlier_for_the_rest() -> None:
    x = normal(1, 1, 40, 128)
    x[..., 0] = 40.0
    plain, clipped = (through(Affine(clip=clip).fit(rates(4, 1, 128)), x) - x for clip in (1.0, 0.95))
    assert clipped[..., 1:].square().mean() < plain[..., 1:].square().mean() / 10
    assert clipped[..., 0].abs().min() > 30


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_an_entry_beyond_float16_spoils_no_other_vector(bits: int) -> None:
    x = normal(1, 1, 3, 64)
    x[0, 0, 1, 7] = 1e5
    back = through(Affine().fit(rates(bits, 1, 64)), x)
    assert torch.isfinite(back).all()
    assert back[0, 0, 1, 7] == back[0, 0, 1].max()
    assert torch.equal(back[0, 0, [0, 2]], through(Affine().fit(rates(bits, 1, 64)), x[:, :, [0, 2]])[0, 0])


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-40, 65504.0])
def test_a_constant_vector_comes_back(value: float) -> None:
    x = torch.full((1, 1, 2, 16), value)
    half_step = max(2.0**-25, abs(value) * 2.0**-12)  # of float16, in which the range is stored
    assert float((through(Affine().fit(rates(2, 1, 16)), x) - x).abs().max()) <= half_step
    assert torch.allclose(through(Float8().fit(rates(8, 1, 16)), x), x, rtol=5e-3)


@pytest.mark.parametrize("given", [{"clip": 0.4}, {"clip": 1.1}])
def test_a_clip_that_is_no_quantile_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"is not a quantile above one half; use 0\.5 < clip <= 1"):
        Affine(**given)


# float8


@pytest.mark.parametrize("largest", [600.0, 1.0, 1e-3, 1e-6, 1e4])
@pytest.mark.parametrize(("kind", "mantissa_bits"), [("e4m3", 3), ("e5m2", 2)])
def test_float8_rounds_alike_at_every_level(kind: str, mantissa_bits: int, largest: float) -> None:
    """The scale follows the vector and is never 1: a relative error is at most half a unit of the mantissa."""
    x = normal(1, 2, 20, 64)
    x = x / x.abs().amax(-1, keepdim=True) * largest
    back = through(Float8(kind).fit(rates(8, 2, 64)), x)
    strong = x.abs() > largest / 64
    relative = ((back - x) / x).abs()[strong]
    assert relative.max() <= 2.0 ** -(mantissa_bits + 1) * 1.01
    assert ((back - x).norm() / x.norm()) < 2.0 ** -(mantissa_bits + 1)


def test_float8_takes_its_byte_and_a_scale() -> None:
    assert bits_per_element(Float8().fit(rates(8, 2, 64)), normal(1, 2, 10, 64)) == 8.25


def test_float8_at_another_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float8 codes take 8 bits, not 4; use Uniform\(8\)"):
        Float8().fit(rates(4, 1, 16))


# Lloyd–Max

MAX_MSE = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # Max (1960), Table I


@pytest.mark.parametrize("bits", MAX_MSE)
def test_lloyd_max_meets_the_published_errors(bits: int) -> None:
    x = normal(1, 1, 400, 512).double()
    quantizer = LloydMax(gain="none").fit(rates(bits, 1, 512))
    error = (quantizer.decode(quantizer.encode(x)).double() - x).square().mean() / x.square().mean()
    assert float(error) == pytest.approx(MAX_MSE[bits], rel=0.01)


def test_lloyd_max_levels_are_the_published_ones() -> None:
    two, _ = gaussian_levels(1)
    four, borders = gaussian_levels(2)
    assert two.tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)], abs=1e-9)
    assert four.tolist() == pytest.approx([-1.5104, -0.4528, 0.4528, 1.5104], abs=1e-4)
    assert borders.tolist() == pytest.approx([-0.9816, 0.0, 0.9816], abs=1e-4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_lloyd_max_levels_are_the_means_of_their_cells(bits: int) -> None:
    levels, borders = gaussian_levels(bits)
    edges = torch.cat([torch.tensor([-torch.inf]), borders, torch.tensor([torch.inf])]).double()
    density = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi)
    means = -density.diff() / torch.special.ndtr(edges).diff()
    assert_near(levels, means, 2e-5)
    assert torch.allclose(borders, (levels[1:] + levels[:-1]) / 2)
    assert torch.allclose(levels, -levels.flip(0))


@pytest.mark.parametrize("gain", ["float16", "log8"])
def test_a_gain_takes_the_level_out(gain: str) -> None:
    """The same vectors at a thousand times the level get the same error, relatively."""
    x = normal(1, 1, 100, 128)
    quantizer = LloydMax(gain=gain).fit(rates(3, 1, 128))  # type: ignore[arg-type]
    errors = [float((through(quantizer, x * s) - x * s).norm() / (x * s).norm()) for s in (0.1, 1.0, 100.0)]
    assert errors == pytest.approx([math.sqrt(MAX_MSE[3])] * 3, rel=0.02)


@pytest.mark.parametrize("kind", ["float16", "log8"])
def test_a_vector_is_its_gain_times_its_shape(kind: str) -> None:
    y = normal(1, 2, 30, 16).double() * torch.logspace(-2, 2, 30)[:, None]
    shape, stored = split_gain(y, kind)  # type: ignore[arg-type]
    assert torch.allclose(shape * gain_values(stored).double()[..., None], y)
    level = shape.square().mean(-1).sqrt()
    assert (level - 1).abs().max() < (0.03 if kind == "log8" else 1e-3)
    assert split_gain(torch.zeros(1, 1, 1, 4).double(), kind)[0].abs().max() == 0  # type: ignore[arg-type]


def test_widths_beyond_lloyds_iteration_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bits per coefficient are more than 10; use 1 to 10"):
        LloydMax().fit(rates(16, 1, 16))


# k-means


def test_k_means_on_a_gaussian_meets_the_known_loss() -> None:
    """Four coefficients in 256 entries: 2 bits each, .325 bit short of the bound 2^−2R, so 2^−2(2−.325) = 0.098."""
    x = normal(1, 16384, 4)
    entries = kmeans(x, 256, 15, seed=0)
    _, error = nearest(x, entries)
    fresh = nearest(normal(1, 16384, 4, seed=1), entries)[1]
    assert float(fresh.mean()) / 4 == pytest.approx(2 ** (-2 * (2 - 0.325)), rel=0.06)
    assert error.mean() < fresh.mean(), "training samples are better served than new ones, by little"


def test_k_means_finds_separated_clusters_that_its_start_misses() -> None:
    """Two entries start at equal samples: one is empty, and takes over half of the cluster with the largest error."""
    centers = torch.tensor([[0.0, 0.0], [10.0, 0.0], [10.0, 1.0]])
    x = centers.repeat_interleave(torch.tensor([200, 20, 20]), 0)[None]
    for seed in range(5):
        entries = kmeans(x, 4, 12, seed)
        assert nearest(x, entries)[1].mean() < 1e-4, seed


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_k_means_is_deterministic_and_leaves_no_entry_empty(seed: int) -> None:
    x = normal(3, 400, 4) ** 3
    tables = kmeans(x, 64, 8, seed)
    assert torch.equal(tables, kmeans(x, 64, 8, seed))
    assert torch.equal(tables[1], kmeans(x[1:2], 64, 8, seed)[0]), "a codebook does not depend on its neighbours"
    chosen, _ = nearest(x, tables)
    assert [len(set(row.tolist())) for row in chosen] == [64] * 3


def test_k_means_of_equal_samples_stays_finite() -> None:
    tables = kmeans(torch.ones(1, 300, 4), 256, 5, 0)
    assert torch.isfinite(tables).all()
    assert nearest(torch.ones(1, 1, 4), tables)[1].max() < 1e-9


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(
        ValueError, match="100 calibration samples cannot train 256 codebook entries; calibrate on more"
    ):
        kmeans(torch.ones(1, 100, 4), 256, 5, 0)


def test_the_nearest_entry_is_the_nearest() -> None:
    x, entries = normal(2, 50, 3), normal(2, 9, 3, seed=1)
    chosen, error = nearest(x, entries)
    distance = torch.cdist(x.double(), entries.double()).square()
    assert torch.equal(chosen, distance.argmin(-1))
    assert_near(error, distance.amin(-1), LAYERS)  # ‖x‖² − 2xᵀe + ‖e‖², whose terms are larger than it


# vector quantizers


def trained(spec: GroupVQ | ByteVQ, x: Tensor, bits: float | Tensor) -> Quantizer:
    g, _, c = x.shape
    given = torch.full((g, c), bits) if isinstance(bits, float) else bits
    return spec.fit(QuantizerData(given, Moments.of(x), x))


def test_group_vq_takes_two_bits_and_a_gain() -> None:
    x = normal(1, 300, 32)
    quantizer = trained(GroupVQ(n_iterations=1), x, 2.0)
    assert quantizer.widths == (8,) * 8
    assert bits_per_element(quantizer, x[None]) == 2 + 16 / 32


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vectors_gain_over_scalars_at_one_rate(size: int) -> None:
    """At 2 bits: Lloyd–Max loses .46 bit to the bound, 4-D vectors .325."""
    x = normal(1, 16384, 8)
    quantizer = trained(GroupVQ(size=size, gain="none", n_iterations=12, max_samples=16384), x, 2.0)
    fresh = normal(1, 1, 4096, 8, seed=1)
    mse = float((through(quantizer, fresh) - fresh).square().mean())
    loss = 2 + math.log2(mse) / 2
    assert loss == pytest.approx({1: 0.46, 2: 0.41, 4: 0.325}[size], abs=0.05)  # a finite training set


def test_byte_codes_hold_every_coefficient_once_in_bytes_of_eight_bits() -> None:
    given = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.8, 0.5, 0.2, 0.0, 0.0])
    planes = cut_into_bytes(given)
    assert len(planes) == 3
    covered = [i for plane in planes for i in plane.coordinates]
    assert sorted(covered) == list(range(10)), "whoever has a rate is coded once, whoever has none is not"
    assert all(abs(float(given[list(plane.coordinates)].sum()) - 8) < 1 for plane in planes)
    assert (
        bits_per_element(trained(ByteVQ(n_iterations=1), normal(1, 300, 12), given[None]), normal(1, 1, 9, 12)) == 2.0
    )


def test_byte_codes_follow_the_spectrum() -> None:
    """Strong and weak coefficients at water-filled rates end with about the same error, as near to the bound as plain
    groups of four are for equal variances."""
    sigma = torch.tensor([8.0] * 2 + [2.0] * 4 + [1.0] * 10)
    rate = sigma.log2() - sigma.log2().mean() + 2
    x, fresh = normal(1, 8192, 16) * sigma, normal(1, 1, 2000, 16, seed=1) * sigma
    quantizer = trained(ByteVQ(n_iterations=8), x, rate[None])
    error = (through(quantizer, fresh) - fresh).square().mean((0, 1, 2))
    bound = 2 ** float(2 * sigma.log2().mean() - 4)
    assert error.max() / error.min() < 2
    assert math.log2(float(error.mean()) / bound) / 2 < 0.40


def test_a_side_without_a_byte_decodes_to_zero_and_holds_nothing() -> None:
    y = normal(1, 1, 9, 12)
    quantizer = trained(ByteVQ(n_iterations=1), normal(1, 300, 12), torch.zeros(1, 12))
    codes = quantizer.encode(y)
    assert codes.symbols.shape == (1, 0, 9)
    assert not quantizer.decode(codes).any()
