"""Closed forms of rotations and of the Karhunen–Loève transform."""

import math

import pytest
import torch
from tests.closeness import assert_near
from tests.synthetic import seeded, vectors
from torch import Tensor

from karhunen.statistics.moments import Moments
from karhunen.transforms.base import TransformData
from karhunen.transforms.chain import ChainSpec, transformed_moments
from karhunen.transforms.klt import KLT, principal_axes, square_root
from karhunen.transforms.rotations import Hadamard, RandomRotation, hadamard_matrix

HEAD_DIMS = [16, 32, 64, 80, 96, 112, 128, 192, 256, 512, 576]
G, C = 2, 24


def data() -> Tensor:
    """Correlated, with a mean far from zero."""
    return vectors(1, G, 400, C)[0].double() + torch.linspace(-3, 3, C, dtype=torch.float64)


def metric() -> Tensor:
    root = torch.randn(G, C, 2 * C, generator=seeded(3), dtype=torch.float64)
    return root @ root.mT


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_the_hadamard_rotation_is_orthogonal_and_flat(d: int) -> None:
    matrix = hadamard_matrix(d)
    assert_near(matrix @ matrix.mT, torch.eye(d, dtype=torch.float64), 1e-12)
    power_of_two = d & (d - 1) == 0
    largest = 1 / math.sqrt(d) if power_of_two else math.sqrt(2 / d)  # a Hartley entry is at most √2 of the mean
    assert matrix.abs().max() <= largest + 1e-12
    if power_of_two:
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, largest))


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_an_outlier_is_spread_over_all_coordinates(d: int) -> None:
    """A spike of height s becomes coordinates of at most √2 s/√d: an outlier 30 times the rest does not stand out."""
    rotated = Hadamard().fit(TransformData(1, d)).forward(30 * torch.eye(d)[:1][None, None])
    assert rotated.abs().max() <= 30 * math.sqrt(2 / d) + 1e-5
    assert abs(float(rotated.norm()) - 30) < 1e-4


@pytest.mark.parametrize("d", [64, 80])
def test_random_rotations_are_orthogonal_differ_by_head_and_follow_the_seed(d: int) -> None:
    fitted = RandomRotation(1).fit(TransformData(2, d))
    matrix = fitted.matrix.double()
    assert_near(matrix @ matrix.mT, torch.eye(d).double().expand(2, d, d), 1e-5)
    assert not torch.allclose(matrix[0], matrix[1])
    assert torch.equal(RandomRotation(1).fit(TransformData(2, d)).matrix, fitted.matrix)
    assert not torch.equal(RandomRotation(2).fit(TransformData(2, d)).matrix, fitted.matrix)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "metric"])
@pytest.mark.parametrize("center", [False, True])
def test_the_klt_decorrelates_and_orders_by_variance(weighted: bool, center: bool) -> None:
    x = data()
    moments = Moments.of(x)
    fitted = KLT(center).fit(TransformData(G, C, moments, metric() if weighted else None))
    y = fitted.forward(x[None])[0]
    second = Moments.of(y).second_moment
    variance = second.diagonal(dim1=-2, dim2=-1)
    off_diagonal = second - torch.diag_embed(variance)
    assert off_diagonal.abs().max() <= 1e-5 * variance.max()
    assert bool((variance.diff(dim=-1) <= 1e-6 * variance[:, :1]).all())
    # the spread of the data decides, not the rounding of the tables
    before = moments.covariance if center else moments.second_moment
    correlated = before - torch.diag_embed(before.diagonal(dim1=-2, dim2=-1))
    assert correlated.abs().max() > 1e-2 * before.abs().max()


def test_squared_error_of_coefficients_is_the_cost_of_the_vectors() -> None:
    """‖y − ŷ‖² = (x − x̂)ᵀ M (x − x̂): the generalised Parseval relation."""
    fitted = KLT().fit(TransformData(G, C, Moments.of(data()), metric()))
    x, other = data()[None, :, :50], data()[None, :, 50:100]
    in_coefficients = (fitted.forward(x) - fitted.forward(other)).square().sum(-1)
    error = (x - other)[0]
    cost = torch.einsum("gni,gij,gnj->gn", error, metric(), error)
    assert torch.allclose(in_coefficients[0], cost, rtol=1e-6)


def test_no_orthogonal_basis_compacts_better_than_the_klt() -> None:
    """The first k coefficients hold at least the energy that k coordinates of any other rotation hold."""
    x = data()
    klt = KLT(center=False).fit(TransformData(G, C, Moments.of(x))).forward(x[None])[0].square().mean(1)
    for seed in range(3):
        other = RandomRotation(seed).fit(TransformData(G, C)).forward(x[None])[0].square().mean(1)
        best = other.sort(dim=-1, descending=True).values
        assert bool((klt.cumsum(-1) >= best.cumsum(-1) * (1 - 1e-6)).all())


def test_principal_axes_of_a_known_covariance() -> None:
    """Eigenvalues 3 and 1 along the diagonals; the largest entry of each axis is positive."""
    axes = principal_axes(torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]))
    half = math.sqrt(0.5)
    assert torch.allclose(axes.abs(), torch.full((1, 2, 2), half).double())
    assert torch.allclose(axes[0, :, 0], torch.tensor([half, half]).double())
    assert bool((axes.gather(-2, axes.abs().argmax(-2, keepdim=True)) > 0).all())


def test_the_roots_of_a_metric_are_inverse_to_each_other() -> None:
    root, inverse = square_root(metric())
    assert torch.allclose(root @ root, metric(), rtol=1e-9)
    assert_near(root @ inverse, torch.eye(C).double().expand(G, C, C), 1e-8)


def test_moments_go_through_a_chain_as_the_vectors_do() -> None:
    x = data()
    fitted = ChainSpec((KLT(), Hadamard(), KLT(center=False))).fit(TransformData(G, C, Moments.of(x)))
    predicted, measured = transformed_moments(Moments.of(x), fitted), Moments.of(fitted.forward(x[None])[0])
    assert predicted is not None
    scale = measured.outer.abs().max()
    assert (predicted.outer - measured.outer).abs().max() <= 1e-6 * scale
    assert (predicted.sum - measured.sum).abs().max() <= 1e-6 * scale


def test_a_transform_of_data_without_data_is_refused() -> None:
    with pytest.raises(ValueError, match="no moments were gathered; calibrate first"):
        KLT().fit(TransformData(G, C))
