"""Drift against numbers known beforehand, and against a search that knows nothing of water."""

import itertools
import math

import pytest
import torch
from tests.closeness import assert_near

from karhunen.adaptation.drift import Drift, drift_of, water_filled
from karhunen.statistics.moments import Moments

ROUNDING = 1e-9  # float64 sums of a few terms


def moments(covariance: torch.Tensor, mean: torch.Tensor | None = None, count: float = 100.0) -> Moments:
    """Of one group with that covariance and mean."""
    d = len(covariance)
    m = torch.zeros(d, dtype=torch.float64) if mean is None else mean.double()
    outer = covariance.double() + torch.outer(m, m)
    return Moments(torch.tensor([count], dtype=torch.float64), count * m[None], count * outer[None])


def test_water_filling_is_the_textbooks_example() -> None:
    """Variances 4, 1 and 1/16 with 2 bits: the water stands at 1/2, so 1.5 and 0.5 bits and none."""
    rates = water_filled(torch.tensor([[1.0, 4.0, 1 / 16]]), torch.tensor([2.0]))
    assert_near(rates, torch.tensor([[0.5, 1.5, 0.0]], dtype=torch.float64), ROUNDING)


def test_no_other_split_of_the_bits_costs_less() -> None:
    variance, bits = torch.tensor([[5.0, 2.0, 0.7, 0.1]], dtype=torch.float64), 3.0
    rates = water_filled(variance, torch.tensor([bits]))
    assert float(rates.sum()) == pytest.approx(bits)
    best = float((variance * torch.exp2(-2 * rates)).sum())
    steps = [i * 0.125 for i in range(25)]
    every = [s for s in itertools.product(steps, repeat=3) if sum(s) <= bits]
    costs = [
        sum(v * 4**-b for v, b in zip(variance[0].tolist(), (*split, bits - sum(split)), strict=True))
        for split in every
    ]
    assert best <= min(costs) <= 1.02 * best


def test_nothing_drifts_while_the_text_is_the_same() -> None:
    design = torch.tensor([[4.0, 1.0, 0.25]], dtype=torch.float64)
    found = drift_of(design, moments(design[0].diag()), torch.tensor([3.0]))
    assert float(found.ratio) == pytest.approx(1.0)


def test_a_louder_text_costs_more_and_has_not_drifted() -> None:
    design = torch.tensor([[4.0, 1.0, 0.25]], dtype=torch.float64)
    quiet, loud = (drift_of(design, moments(k * design[0].diag()), torch.tensor([3.0])) for k in (1.0, 9.0))
    assert float(loud.used) == pytest.approx(9 * float(quiet.used))
    assert float(loud.ratio) == pytest.approx(1.0)


def test_variances_that_changed_places() -> None:
    """Plan for 4 and 1/4 with 2 bits: θ = 1/4, so 2 and 0 bits. Today 1/4 and 4: 1/64 + 4 in place of 1/4 + 1/4."""
    design = torch.tensor([[4.0, 0.25]], dtype=torch.float64)
    found = drift_of(design, moments(torch.tensor([0.25, 4.0]).diag()), torch.tensor([2.0]))
    assert float(found.used) == pytest.approx(0.25 / 16 + 4)
    assert float(found.best) == pytest.approx(0.5)
    assert float(found.ratio) == pytest.approx((0.25 / 16 + 4) / 0.5)


def test_turned_axes() -> None:
    """Variances 4 and 1/4 turned by 45°: 17/8 on each old axis."""
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
    now = turn @ torch.tensor([4.0, 0.25], dtype=torch.float64).diag() @ turn.mT
    found = drift_of(torch.tensor([[4.0, 0.25]]).double(), moments(now), torch.tensor([2.0]))
    assert float(found.used) == pytest.approx(17 / 8 / 16 + 17 / 8)
    assert float(found.best) == pytest.approx(0.5)


def test_a_mean_that_moved_is_paid_for_until_the_codec_is_fitted_again() -> None:
    """No bits: what is used pays for the mean's square, the best takes the mean away."""
    design = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    found = drift_of(design, moments(design[0].diag(), torch.tensor([3.0, 0.0])), torch.tensor([0.0]))
    assert float(found.ratio) == pytest.approx((2 + 9) / 2)


def test_drift_is_never_below_one() -> None:
    x = torch.randn(3, 50, 6, generator=torch.Generator().manual_seed(0)).double()
    design = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)).double()
    assert bool((drift_of(design, Moments.of(x), torch.tensor([0.0, 4.0, 40.0])).ratio >= 1 - ROUNDING).all())


def test_layers_count_by_what_they_cost() -> None:
    parts = [Drift(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])), Drift(torch.tensor([1.0]), torch.tensor([1.0]))]
    assert Drift.together(parts) == pytest.approx(4 / 3)
    assert Drift.together([]) == 1.0
