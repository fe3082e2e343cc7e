"""Triplets as a length and a direction, against what is known of evenly spread directions."""

import math

import pytest
import torch
from tests.closeness import assert_near
from tests.quantizers.test_quantizers import rates, through
from tests.synthetic import seeded
from torch import Tensor

from karhunen.quantizers.lloyd_max import LloydMax
from karhunen.quantizers.octahedral import Octahedral, fold, length_levels, side_levels, unfold


def spread(n: int, d: int) -> Tensor:
    """Directions, evenly."""
    return torch.nn.functional.normalize(torch.randn(n, d, generator=seeded(0), dtype=torch.float64), dim=-1)


def test_the_unfolded_octahedron_is_a_square_that_folds_back() -> None:
    axes = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    for directions in (axes, spread(2000, 3)):
        assert float(fold(directions).abs().max()) <= 1
        assert_near(unfold(fold(directions)), directions, 1e-12)
    assert fold(axes[5]).abs().tolist() == [1.0, 1.0]  # the pole below is all four corners


@pytest.mark.parametrize("bits", [3, 5])
def test_levels_of_a_side_are_the_means_of_their_cells(bits: int) -> None:
    levels = side_levels(bits)
    side = fold(spread(400_000, 3))[:, 0].contiguous()
    cell = torch.bucketize(side, (levels[1:] + levels[:-1]) / 2)
    counts = cell.bincount(minlength=len(levels))
    means = torch.zeros_like(levels).index_add(0, cell, side) / counts
    noise = 2 / 2**bits / math.sqrt(12 * float(counts.min()))  # a cell's width over √12, and over √n
    assert float((levels - means).abs().max()) < 6 * noise
    assert torch.equal(levels, -levels.flip(0))


@pytest.mark.parametrize("d", [8, 64, 128])
def test_one_level_of_length_is_the_mean_of_the_beta_density(d: int) -> None:
    """E √X for X ~ Beta(3/2, (d − 3)/2)."""
    mean = math.exp(math.lgamma(2) + math.lgamma(d / 2) - math.lgamma(1.5) - math.lgamma((d + 1) / 2))
    assert length_levels(d, 0).item() == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(("bits", "theirs"), [(2, 0.0897), (4, 0.0071)])
def test_the_error_is_no_larger_than_the_papers_and_a_fifth_below_scalar_levels(bits: int, theirs: float) -> None:
    y = spread(1000, 128).float()[None, None]
    error, scalar = (
        float((through(spec.fit(rates(bits, 1, 128)), y) - y).square().sum() / y.square().sum())
        for spec in (Octahedral(), LloydMax())
    )
    assert 0.85 * theirs < error < theirs
    assert error < 0.8 * scalar


def test_of_nine_directions_the_closest_is_taken_and_then_the_length_along_it() -> None:
    d, bits = 9, 2
    made = Octahedral().fit(rates(bits, 1, d))
    y = spread(40, d).float()[None, None]
    codes = made.encode(y)
    sides, lengths = side_levels(bits + 1), length_levels(d, bits - 1)
    for t in range(40):
        unit = y[0, 0, t].double() / codes.side["norm"][0, 0, t].double()
        for k in range(3):
            x = unit[3 * k : 3 * k + 3]
            near = [int((sides - at).abs().argmin()) for at in fold(x)]
            around = [
                (i, j) for i in range(near[0] - 1, near[0] + 2) for j in range(near[1] - 1, near[1] + 2)
                if 0 <= i < len(sides) and 0 <= j < len(sides)
            ]  # fmt: skip
            along = {at: float(x @ unfold(sides[list(at)])) for at in around}
            first, second, length = codes.symbols[0, :, t].view(3, 3)[:, k].tolist()
            assert along[first, second] == pytest.approx(max(along.values()), rel=1e-12)
            assert length == int((lengths - max(along.values())).abs().argmin())


def test_rates_and_sizes_that_triplets_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match="one rate of 2 to 7"):
        Octahedral().fit(rates(1, 1, 32))
    with pytest.raises(ValueError, match="one triplet"):
        Octahedral().fit(rates(2, 1, 3))
