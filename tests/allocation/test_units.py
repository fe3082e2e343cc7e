import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from karhunen.allocation.units import distortion_bound, units_by_return
from karhunen.allocation.water_filling import ideal_bits

LOSS = ((0.0, 1.0), (2.0, 1.6), (4.0, 2.5), (6.0, 7.0))


def spectrum(seed: int, c: int = 12) -> torch.Tensor:
    return torch.randn(c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(3).exp()


@pytest.mark.parametrize("n_units", [1, 3, 9])
def test_the_bound_is_that_of_reverse_water_filling(n_units: int) -> None:
    variance = spectrum(0)
    ones = torch.ones(12, dtype=torch.float64)
    bits = ideal_bits(variance, ones, 0 * ones, 99 * ones, 8.0 * n_units)
    expected = float((variance * torch.exp2(-2 * bits)).sum())
    assert float(distortion_bound(variance, 8, n_units)[-1]) == pytest.approx(expected, rel=1e-6)
    assert float(distortion_bound(variance, 8, 0)[0]) == pytest.approx(float(variance.sum()))


def test_equal_heads_share_and_a_stronger_one_gets_more() -> None:
    same = units_by_return([spectrum(1)] * 4, 8, 20, 24.0, [()] * 4)
    assert same.tolist() == [5, 5, 5, 5]
    weak, strong = units_by_return([spectrum(1), 64 * spectrum(1)], 8, 12, 24.0, [(), ()]).tolist()
    assert weak + strong == 12 and strong > weak
    assert 8 * (strong - weak) / 12 == pytest.approx(3, abs=1), "64 times the variance: three bits a coefficient more"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 25))
def test_no_other_way_to_spend_the_units_is_better_where_distortion_is_convex(seed: int, n_units: int) -> None:
    spectra = [spectrum(seed), 10 * spectrum(seed + 1), 0.1 * spectrum(seed + 2)]
    given_units = units_by_return(spectra, 8, n_units, 24.0, [()] * 3)
    assert int(given_units.sum()) == n_units
    curves = [distortion_bound(s, 8, n_units) for s in spectra]
    best = min(
        float(curves[0][i] + curves[1][j] + curves[2][n_units - i - j])
        for i in range(n_units + 1)
        for j in range(n_units + 1 - i)
    )
    mine = float(sum(curve[int(u)] for curve, u in zip(curves, given_units, strict=True)))
    assert mine == pytest.approx(best, rel=1e-9)


def test_the_loss_of_the_quantizer_counts() -> None:
    spectra = [100 * torch.ones(12).double(), torch.ones(12).double()]
    at, factor = zip(*LOSS, strict=True)
    loss = np.interp(np.arange(10) * 8 / 12, at, factor)
    curves = [distortion_bound(s, 8, 9).numpy() * loss for s in spectra]
    best = min(range(10), key=lambda u: curves[0][u] + curves[1][9 - u])
    assert units_by_return(spectra, 8, 9, 24.0, [LOSS, LOSS]).tolist() == [best, 9 - best]
    assert units_by_return(spectra, 8, 9, 24.0, [(), ()])[0] != best


def test_no_head_gets_more_than_it_can_hold() -> None:
    held = units_by_return([spectrum(4), spectrum(5)], 8, 1000, 8.0, [(), ()])
    assert held.tolist() == [12, 12]
