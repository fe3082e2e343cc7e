"""Reverse water-filling against its closed form and against every other way to spend the bits."""

import itertools
import math

import pytest
import torch
from tests.closeness import assert_near
from tests.synthetic import seeded
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.allocation.rounding import to_integers
from karhunen.allocation.uniform import Uniform
from karhunen.allocation.water_filling import WaterFilling, ideal_bits, stored_bits


def filled(variance: Tensor, bits: float, cost: RateCost, scope: str = "layer") -> Tensor:
    return WaterFilling(bits, scope).rates({0: variance}, {0: cost})[0]  # type: ignore[arg-type]


REAL = RateCost(integer=False, max_bits=24)


def test_bits_above_the_line_are_half_the_log_of_the_variance_over_it() -> None:
    """Variances 64, 16, 4, 1 at 2 bits each: all are above the line, which is 4^(1.5 − 2) = 1/2."""
    bits = filled(torch.tensor([[64.0, 16.0, 4.0, 1.0]]).double(), 2.0, REAL)
    assert bits[0].tolist() == pytest.approx([3.5, 2.5, 1.5, 0.5], abs=1e-6)


def test_what_is_below_the_line_gets_nothing() -> None:
    """2 bits in all for 64, 16, 4, 1: (64/θ)(16/θ) = 2⁴ gives θ = 8, and 4 and 1 are below it."""
    bits = filled(torch.tensor([[64.0, 16.0, 4.0, 1.0]]).double(), 0.5, REAL)
    assert bits[0].tolist() == pytest.approx([1.5, 0.5, 0.0, 0.0], abs=0.02)


def test_every_coded_coefficient_ends_with_the_same_error() -> None:
    variance = torch.logspace(2, -3, 40, dtype=torch.float64)[None]
    bits = filled(variance, 1.5, REAL)
    error = variance * 2 ** (-2 * bits)
    coded = bits > 0
    assert error[coded].max() / error[coded].min() == pytest.approx(1, rel=1e-6)
    assert error[~coded].max() <= error[coded].min() * (1 + 1e-6)
    assert float(bits.sum()) == pytest.approx(60, abs=1e-6)


def distortion(variance: Tensor, widths: Tensor) -> float:
    return float((variance * 2.0 ** (-2 * widths)).sum())


@pytest.mark.parametrize("seed", range(6))
def test_integer_widths_are_near_the_best_of_all_integer_widths(seed: int) -> None:
    variance = torch.rand(5, generator=seeded(seed)).double() ** 6 + 1e-6
    widths = filled(variance[None], 2.0, RateCost(max_bits=8))[0]
    assert int(widths.sum()) == 10
    every = [w for w in itertools.product(range(9), repeat=5) if sum(w) == 10]
    best = min(distortion(variance, torch.tensor(w).double()) for w in every)
    assert distortion(variance, widths) <= 1.25 * best


@pytest.mark.parametrize("bits", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("seed", range(6))
def test_with_an_overhead_the_choice_of_groups_is_near_the_best(seed: int, bits: float) -> None:
    """Five groups of 8 coefficients, 8 bits for the range of each that is kept, all within the budget."""
    group, overhead, n = 8, 8.0, 5
    variance = (torch.rand(n, generator=seeded(seed)).double() ** 6 + 1e-6).sort(descending=True).values
    cost = RateCost(group=group, overhead_bits=overhead, max_bits=8)
    widths = filled(variance.repeat_interleave(group)[None], bits, cost)[0][::group]
    budget = bits * n * group

    def spent(w: tuple[int, ...]) -> float:
        return sum(group * b + overhead * (b > 0) for b in w)

    assert spent(tuple(widths.int().tolist())) <= budget
    every = [w for w in itertools.product(range(9), repeat=n) if spent(w) <= budget]
    best = min(distortion(variance, torch.tensor(w).double()) for w in every)
    assert distortion(variance, widths) <= 1.6 * best


@pytest.mark.parametrize("bits", [1.0, 2.0, 3.5])
def test_no_budget_is_left_that_would_pay_for_another_bit(bits: float) -> None:
    """Ranges of groups that end with no bits are not paid for."""
    group, overhead = 8, 8.0
    variance = torch.logspace(2, -4, 20, dtype=torch.float64)
    cost = RateCost(group=group, overhead_bits=overhead, max_bits=8)
    widths = filled(variance.repeat_interleave(group)[None], bits, cost)[0][::group]
    spent = float((group * widths + overhead * (widths > 0)).sum())
    assert bits * 160 - group - overhead < spent <= bits * 160


def test_gains_are_paid_from_the_budget() -> None:
    variance = torch.ones(2, 16).double()
    rates = filled(variance, 3.0, RateCost(token_bits=16.0))
    assert float(rates.sum()) + 2 * 16 == 3.0 * 32
    with pytest.raises(ValueError, match=r"32 bits per token do not even pay for the 32 bits of gains"):
        filled(variance, 1.0, RateCost(token_bits=16.0))


def test_the_scope_decides_who_shares_a_line() -> None:
    variance = {0: torch.tensor([[16.0, 16.0], [1.0, 1.0]]).double(), 1: torch.tensor([[256.0, 256.0]] * 2).double()}
    cost = dict.fromkeys(variance, REAL)
    head, layer, model = (WaterFilling(3.0, scope).rates(variance, cost) for scope in ("head", "layer", "model"))  # type: ignore[arg-type]
    assert_near(head[0], torch.full((2, 2), 3.0).double(), 1e-6)
    assert layer[0].mean(-1).tolist() == pytest.approx([4.0, 2.0], abs=1e-6)
    assert layer[1].mean(-1).tolist() == pytest.approx([3.0, 3.0], abs=1e-6)
    assert model[0].mean(-1).tolist() == pytest.approx([2.5, 0.5], abs=1e-6)
    assert model[1].mean(-1).tolist() == pytest.approx([4.5, 4.5], abs=1e-6)


def test_whole_bytes_where_the_quantizer_asks_for_them() -> None:
    variance = torch.logspace(1, -2, 32, dtype=torch.float64).expand(3, 32) * torch.tensor([[4.0], [1.0], [0.1]])
    rates = filled(variance, 2.0, RateCost(integer=False, max_bits=24, unit_bits=8))
    sums = rates.sum(-1)
    assert_near(sums / 8, (sums / 8).round(), 1e-6)
    assert float(sums.sum()) == pytest.approx(2 * 96, abs=1e-6)
    assert sums[0] > sums[1] > sums[2]


@pytest.mark.parametrize("token_bytes", [7, 24, 51])
def test_a_budget_in_bytes_of_a_token_is_met_to_the_byte(token_bytes: int) -> None:
    variance = torch.logspace(1, -2, 32, dtype=torch.float64).expand(3, 32) * torch.tensor([[4.0], [1.0], [0.1]])
    cost = RateCost(integer=False, max_bits=24, unit_bits=8)
    rates = WaterFilling(2.0, "model", token_bytes).rates({0: variance, 1: variance / 9}, dict.fromkeys((0, 1), cost))
    assert float(sum(r.sum() for r in rates.values())) == pytest.approx(8 * token_bytes, abs=1e-6)
    with pytest.raises(ValueError, match="budget of the whole model"):
        WaterFilling(2.0, "layer", token_bytes)


@pytest.mark.parametrize("bits", [0.75, 1.0, 1.5, 2.5])
def test_no_group_gets_a_width_that_is_worse_than_none(bits: float) -> None:
    variance = torch.logspace(2, -2, 64, dtype=torch.float64)[None]
    plain = filled(variance, bits, RateCost(group=4, overhead_bits=4))
    rates = filled(variance, bits, RateCost(group=4, overhead_bits=4, least_bits=2))
    assert set(rates.unique().tolist()) & {1.0} == set()
    cost = RateCost(group=4, overhead_bits=4)
    assert stored_bits(rates, cost) <= bits * 64 + 1e-6
    assert stored_bits(rates, cost) > bits * 64 - 4
    if 1.0 in plain:
        assert (rates > 0).sum() < (plain > 0).sum()


def test_zero_variance_gets_no_bits_and_no_nan() -> None:
    rates = filled(torch.tensor([[4.0, 1.0, 0.0, 0.0]]).double(), 2.0, RateCost())
    assert rates[0].tolist() == [5.0, 3.0, 0.0, 0.0] or rates[0].tolist() == [4.0, 4.0, 0.0, 0.0]
    assert torch.isfinite(filled(torch.zeros(1, 4).double(), 2.0, RateCost())).all()


def test_a_budget_for_no_group_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"48 bits per token is too small for a single group of 24 .* use more bits or"
    ):
        filled(torch.ones(1, 24).double(), 2.0, RateCost(group=24, overhead_bits=32))


def test_uniform_gives_all_the_same() -> None:
    assert torch.equal(Uniform(3).rates({0: torch.rand(2, 5)}, {0: RateCost()})[0], torch.full((2, 5), 3.0))


# rounding


@pytest.mark.parametrize("seed", range(5))
def test_largest_remainder_keeps_the_sum_and_stays_within_one(seed: int) -> None:
    ideal = 4 * torch.rand(50, generator=seeded(seed)).double()
    ideal = ideal * (100 / ideal.sum())
    whole = to_integers(ideal, 100)
    assert int(whole.sum()) == 100
    assert (whole - ideal).abs().max() < 1
    up, down = (ideal - ideal.floor())[whole > ideal], (ideal - ideal.floor())[whole <= ideal]
    assert up.min() >= down.max(), "the largest remainders are rounded up"


def test_largest_remainder_by_hand() -> None:
    assert to_integers(torch.tensor([1.6, 1.6, 0.8]).double(), 4).tolist() == [2, 1, 1]
    assert to_integers(torch.tensor([2.5, 2.5]).double(), 5).tolist() == [3, 2], "the first wins a tie"
    assert to_integers(torch.tensor([9.0, 0.5, 0.5]).double(), 10, most=8).tolist() == [8, 1, 1]
    assert to_integers(torch.tensor([3.0, 1.0]).double(), 2).tolist() == [2, 0], "what is short by whole bits is shared"


def test_a_sum_out_of_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="2 integers between 0 and 8 cannot sum to 17"):
        to_integers(torch.tensor([8.0, 8.0]).double(), 17, most=8)


def test_ideal_bits_spend_the_budget_with_overheads() -> None:
    variance, n = torch.logspace(3, -1, 12, dtype=torch.float64), torch.full((12,), 4.0).double()
    overhead, most = torch.full((12,), 6.0).double(), torch.full((12,), 20.0).double()
    bits = ideal_bits(variance, n, overhead, most, 100.0)
    spent = float((n * bits + overhead * (bits > 0)).sum())
    smallest = float((4 * bits[bits > 0].min()) + 6)
    assert 100 - smallest - 6 - 4 * math.log2(10) < spent <= 100 + 1e-6


@pytest.mark.parametrize("bits", [0, 17])
def test_a_width_that_is_none_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=r"is out of range; use 1 to 16"):
        Uniform(bits)


@pytest.mark.parametrize("bits", [0.0, -1.0, 17.0, float("nan")])
def test_a_rate_that_is_none_is_refused(bits: float) -> None:
    with pytest.raises(ValueError, match="is out of range; use more than 0 and at most 16"):
        WaterFilling(bits)
