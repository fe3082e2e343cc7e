"""Methods that rotate: TurboQuant and its presets, PolarQuant, OSCAR, RotateKV, SpinQuant, against known numbers."""

import math

import pytest
import torch
from tests.closeness import SUM, assert_near
from tests.synthetic import codec, seeded, vectors
from torch import Tensor

from karhunen.codec import SideCodec
from karhunen.fitting import fit
from karhunen.quantizers.affine import Affine
from karhunen.quantizers.base import Quantizer, QuantizerData
from karhunen.quantizers.lloyd_max import LloydMax
from karhunen.quantizers.norm_corrected import NormCorrected
from karhunen.quantizers.pair_polar import middles, sectors
from karhunen.quantizers.recursive_polar import RecursivePolar, angle_levels, from_polar, to_polar
from karhunen.quantizers.residual_sign import ResidualSign
from karhunen.recipes import make
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.transforms.base import TransformData
from karhunen.transforms.bit_reversal import BitReversal, reversed_order
from karhunen.transforms.learned_rotation import LearnedRotation, cayley_step, drawn_vectors, mean_squared_range
from karhunen.transforms.metric_axes import MetricAxes
from karhunen.transforms.reordered_hadamard import ReorderedHadamard
from karhunen.transforms.rotations import Hadamard, hadamard_matrix

HEAD = LayerShape("full", 1, 1, 128, 128)


def uncalibrated(text: str, shape: LayerShape = HEAD) -> tuple[SideCodec, SideCodec]:
    layer = fit(make(text), Statistics(ModelIdentity("none", "c", "w", (shape,)), {0: LayerStatistics()})).layers[0]
    return layer.key, layer.value


def outlying(t: int, d: int = 128, seed: int = 0) -> Tensor:
    """Vectors that no rotation was made for: heavy tails and levels two decades apart."""
    return torch.randn(1, 1, t, d, generator=seeded(seed)) ** 3 * torch.logspace(-1, 1, t)[:, None]


def bits_per_element(side: SideCodec, t: int = 128) -> float:
    x = vectors(1, side.n_heads, t, 128)
    return 8 * sum(part.nbytes for part in side.encode(x, torch.arange(t)[None]).tensors()) / x.numel()


@pytest.mark.parametrize(("bits", "error"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_turboquant_meets_its_papers_error_on_average_over_vectors_of_heavy_tails(bits: int, error: float) -> None:
    """arXiv:2504.19874, Theorem 1 and its table: D_mse ≈ 0.36, 0.117, 0.03, 0.009 of ‖x‖², expected over rotations."""
    side, _ = uncalibrated(f"turboquant:bits={bits}")
    x = outlying(400)
    back = side.distort(x, torch.arange(400)[None])
    assert float((back - x).square().sum() / x.square().sum()) == pytest.approx(error, rel=0.2)


def test_turboquant_takes_its_bits_and_one_norm() -> None:
    assert bits_per_element(uncalibrated("turboquant:bits=4")[0]) == 4 + 16 / 128
    assert bits_per_element(uncalibrated("turboquant_prod:bits=4")[0]) == 4 + 32 / 128


def rates(bits: float, c: int = 64) -> QuantizerData:
    return QuantizerData(torch.full((1, c), float(bits)))


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_inner_products_with_the_residuals_signs_are_unbiased(bits: int) -> None:
    """arXiv:2504.19874, Theorem 2: E_S ⟨q, x̂⟩ = ⟨q, x⟩; without the signs the estimate is short by the cell means."""
    n_seeds = 40
    x = torch.randn(1, 1, 200, 64, generator=seeded(1))
    q = x + torch.randn(1, 1, 200, 64, generator=seeded(2))  # alike, so that there is something to be short of

    def error(quantizer: Quantizer) -> Tensor:
        return ((quantizer.decode(quantizer.encode(x)) - x) * q).sum(-1).mean()

    errors = torch.stack([error(ResidualSign(seed=seed).fit(rates(bits))) for seed in range(n_seeds)])
    spread = float(errors.std()) / math.sqrt(n_seeds)
    assert abs(float(errors.mean())) < 3.5 * spread
    assert float(error(LloydMax().fit(rates(bits)))) < -3.5 * spread


def test_the_variance_of_a_sign_estimate_is_the_papers() -> None:
    """QJL, Lemma 4: Var ⟨q, r̂⟩ ≤ π/(2 d) ‖q‖² ‖r‖²; nearly met where q and r are unlike."""
    x, q = (torch.randn(1, 1, 200, 64, generator=seeded(seed)) for seed in (1, 2))
    bound = (math.pi / 128 * q.square().sum(-1) * x.square().sum(-1)).mean()
    squared = []
    for seed in range(40):
        quantizer = ResidualSign(seed=seed).fit(rates(1))  # no bit for the inner quantizer: the residual is the vector
        squared.append(((quantizer.decode(quantizer.encode(x)) - x) * q).sum(-1).square().mean())
    assert float(torch.stack(squared).mean() / bound) == pytest.approx(1.0, abs=0.05)


def test_a_corrected_norm_is_the_vectors_own() -> None:
    x = torch.randn(1, 2, 50, 64, generator=seeded(3)) * torch.logspace(-2, 2, 50)[:, None]
    data = QuantizerData(torch.full((2, 64), 3.0))
    corrected, plain = NormCorrected().fit(data), LloydMax().fit(data)
    length = x.norm(dim=-1)
    assert torch.allclose(corrected.decode(corrected.encode(x)).norm(dim=-1), length, rtol=1e-3)
    shortened = float((plain.decode(plain.encode(x)).norm(dim=-1) / length).mean())
    assert shortened == pytest.approx(1 - 0.0345 / 2, abs=0.01)
    assert torch.equal(corrected.encode(x).symbols, plain.encode(x).symbols)


@pytest.mark.parametrize(
    ("preset", "key_bits", "value_bits"),
    [("k8v4", 8.125, 4.25), ("4bit", 4.125, 4.25), ("k3v4", 3.125, 4.25), ("3bit", 3.125, 3.25)],
)
def test_a_serving_preset_takes_the_bits_its_name_says(preset: str, key_bits: float, value_bits: float) -> None:
    """With 16 bits of scale or norm per key and 32 of range per value, at head size 128."""
    key, value = uncalibrated(f"turboquant_{preset}")
    assert (bits_per_element(key), bits_per_element(value)) == (key_bits, value_bits)


# PolarQuant, recursive


def test_polar_coordinates_and_back() -> None:
    x = torch.randn(2, 3, 48, generator=seeded(0), dtype=torch.float64)
    radius, angles = to_polar(x)
    assert [a.shape[-1] for a in angles] == [24, 12, 6, 3]
    assert torch.allclose(radius, x.unflatten(-1, (3, 16)).norm(dim=-1))
    assert torch.allclose(from_polar(radius, angles), x)


def test_recursive_polar_takes_the_papers_three_and_seven_eighths_bits() -> None:
    """(8·4 + 7·2 + 16) / 16, for sixteen coefficients of one block."""
    assert bits_per_element(uncalibrated("polarquant")[0]) == 3.875


@pytest.mark.parametrize("k", [1, 2, 3])
def test_angles_of_gaussian_vectors_have_the_density_of_the_table(k: int) -> None:
    """Angles of round k + 1 have the density sin^{2^k − 1}(2ψ), so the table's levels are the means of their cells."""
    _, angles = to_polar(torch.randn(200_000, 16, generator=seeded(0), dtype=torch.float64))
    levels, borders = angle_levels(k, 2)
    psi = angles[k].flatten()
    assert torch.allclose(levels + levels.flip(0), torch.full((4,), math.pi / 2, dtype=torch.float64))
    cells = torch.bucketize(psi, borders)
    means = torch.stack([psi[cells == j].mean() for j in range(4)])
    assert_near(levels, means, 0.01)  # a level is the mean of what falls into its cell


def test_the_error_of_the_first_angle_is_that_of_a_circle_in_equal_sectors() -> None:
    """E |e^{iθ} − e^{iθ̂}|² = 2 (1 − sin(a)/a), a = π / 2^w: 0.0128 at 4 bits."""
    angle = torch.rand(200_000, generator=seeded(0), dtype=torch.float64) * 2 * math.pi - math.pi
    error = 2 - 2 * (angle - middles(sectors(angle, 4), 4).double()).cos()
    assert float(error.mean()) == pytest.approx(2 * (1 - math.sin(math.pi / 16) / (math.pi / 16)), rel=0.01)


def test_recursive_polar_on_vectors_of_heavy_tails_errs_as_on_gaussian_ones() -> None:
    side, _ = uncalibrated("polarquant")
    x, normal = outlying(300), torch.randn(1, 1, 300, 128, generator=seeded(5))
    at = torch.arange(300)[None]
    errors = [float((side.distort(v, at) - v).square().sum() / v.square().sum()) for v in (x, normal)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert errors[0] < 0.07


def test_blocks_that_polar_rounds_cannot_halve_are_refused() -> None:
    with pytest.raises(ValueError, match="24 coefficients are not blocks of 16"):
        RecursivePolar().cost(24)


# PolarQuant, pairs


def test_a_rotating_pair_of_steady_radius_costs_nothing_but_its_angle() -> None:
    """The paper's reason: an outlier pair circles, so its channels swing while its radius stays."""
    turn = torch.arange(64)[None, None, :, None] * torch.linspace(0.1, 2.0, 64)
    radius = torch.linspace(1, 30, 64)
    x = torch.cat([radius * turn.cos(), radius * turn.sin()], dim=-1)
    key, _ = uncalibrated("polarquant_pairs:bits=4")
    back = key.distort(x, torch.arange(64)[None])
    assert torch.allclose(torch.hypot(*back.chunk(2, dim=-1)), radius.expand(1, 1, 64, 64), rtol=2e-3)
    error = float((back - x).square().sum() / x.square().sum())
    assert error == pytest.approx(2 * (1 - math.sin(math.pi / 16) / (math.pi / 16)), rel=0.1)
    assert bits_per_element(key) == 4 + 16 / 32, "one range per pair and 32 tokens"
    finer, _ = uncalibrated("polarquant_pairs:bits=4,angle_extra=1")
    error = float((finer.distort(x, torch.arange(64)[None]) - x).square().sum() / x.square().sum())
    assert error == pytest.approx(2 * (1 - math.sin(math.pi / 32) / (math.pi / 32)), rel=0.1), "32 sectors"
    assert bits_per_element(finer) == bits_per_element(key), "what an angle gains, a radius gives"


def test_a_radius_without_a_bit_is_refused() -> None:
    with pytest.raises(ValueError, match="radius 0 bits and an angle 2"):
        uncalibrated("polarquant_pairs:bits=1,angle_extra=1")


# OSCAR


def test_oscars_key_rotation_spreads_the_query_metric_evenly() -> None:
    """A metric diagonal in U_Q has, behind a Hadamard matrix, equal cost on every coefficient: trace / d."""
    root = torch.randn(2, 32, 32, generator=seeded(0), dtype=torch.float64) * torch.logspace(0, -2, 32)
    metric = root @ root.mT
    axes, spread = MetricAxes().fit(TransformData(2, 32, None, metric)), Hadamard().fit(TransformData(2, 32))
    turn = axes.matrix.double() @ spread.matrix.double()
    cost = (turn.mT @ metric @ turn).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(cost, metric.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).expand(2, 32), rtol=1e-5)


def test_bits_of_an_index_are_reversed() -> None:
    assert reversed_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(reversed_order(80)) == list(range(80))
    x = torch.arange(8.0)[None, None]
    assert BitReversal().fit(TransformData(1, 8)).forward(x)[0, 0].tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_oscar_takes_its_papers_bits() -> None:
    """Two bits and one float16 range per token and head of 128: 2.25; the exact tokens make it 2.28."""
    made = codec("oscar", LayerShape("full", 2, 4, 128, 128)).layers[0]
    assert (bits_per_element(made.key), bits_per_element(made.value)) == (2.25, 2.25)


# RotateKV


def test_rotatekv_spreads_one_channel_over_all_heads_of_its_group() -> None:
    """Channel 3 of head 1 alone: behind the rotation every coefficient of heads 0 and 1 is 1/√64 of it, others none."""
    x = torch.zeros(1, 40, 128)  # four heads of 32
    x[..., 35] = torch.linspace(-9, 9, 40)
    data = TransformData(1, 128, Moments.of(x + 1e-3 * torch.randn(x.shape, generator=seeded(0))), n_heads=4)
    y = ReorderedHadamard(2).fit(data).forward(x)
    assert_near(y[..., :64].abs(), (x[..., 35:36].abs() / 8).expand(1, 40, 64), SUM)
    assert float(y[..., 64:].abs().max()) == 0


def test_strong_channels_stand_at_the_front_of_the_hadamard_rows() -> None:
    """P sorts by strength: the strongest channel meets row 0, which is constant."""
    strength = torch.tensor([1.0, 5.0, 2.0, 9.0])
    x = strength * torch.randn(1, 500, 4, generator=seeded(0))
    matrix = ReorderedHadamard().fit(TransformData(1, 4, Moments.of(x))).matrix[0]
    assert torch.allclose(matrix[3], torch.full((4,), 0.5))
    assert torch.equal(matrix[1], Hadamard().fit(TransformData(1, 4)).matrix[0, 1])


# SpinQuant


def test_a_cayley_step_stays_orthogonal_and_goes_down() -> None:
    x = vectors(1, 2, 300, 32)[0].double()
    q = hadamard_matrix(32).expand(2, 32, 32)
    before = mean_squared_range(x @ q, 32)
    for _ in range(20):
        q = cayley_step(q, x, 32, 0.1)
    assert_near(q @ q.mT, torch.eye(32, dtype=q.dtype).expand(2, 32, 32), 1e-12)
    assert bool((mean_squared_range(x @ q, 32) < 0.97 * before).all())


def test_a_learned_rotation_is_orthogonal_and_beats_the_hadamard_rotation() -> None:
    moments = Moments.of(vectors(1, 2, 300, 32)[0] + 3 * torch.eye(32)[5])
    fitted = LearnedRotation().fit(TransformData(2, 32, moments))
    eye = torch.eye(32).expand(2, 32, 32)
    assert_near(fitted.matrix @ fitted.matrix.mT, eye, 1e-5)
    fresh = drawn_vectors(moments, 2000, seeded(9))
    learned = mean_squared_range(fitted.forward(fresh), 32)
    hadamard = mean_squared_range(Hadamard().fit(TransformData(2, 32)).forward(fresh), 32)
    assert bool((learned < 0.95 * hadamard).all())


def test_the_error_of_a_uniform_quantizer_follows_the_loss_that_is_learned() -> None:
    """step² / 12, step = range / (2^b − 1): half the squared range is half the error."""
    moments = Moments.of(vectors(1, 2, 300, 32)[0] + 3 * torch.eye(32)[5])
    quantizer = Affine().fit(QuantizerData(torch.full((2, 32), 4.0)))
    fresh = drawn_vectors(moments, 2000, seeded(9))
    for spec in (LearnedRotation(), Hadamard()):
        y = spec.fit(TransformData(2, 32, moments)).forward(fresh)[None]
        error = (quantizer.decode(quantizer.encode(y)) - y).square().mean((0, 2, 3))
        assert torch.allclose(error, mean_squared_range(y[0], 32) / 15**2 / 12, rtol=0.1)
