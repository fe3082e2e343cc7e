"""The rate on a report card is the tables' own: exact numbers count 16 bits, whatever the model runs in."""

import pytest

from karhunen.evaluation.verify import bits_of
from karhunen.store.account import Account


@pytest.mark.parametrize("itemsize", [2, 4])
def test_an_exact_number_beside_codes_counts_16_bits(itemsize: int) -> None:
    held = Account(
        codes=200, side=8, exact=50 * itemsize, exceptions=10 * itemsize, dense=1000 * itemsize,
        n_elements=1000, n_coded_elements=800,
    )  # fmt: skip
    assert bits_of(held) == pytest.approx((8 * 208 + 16 * 10) / 800)


def test_of_a_cache_that_codes_nothing_all_counts() -> None:
    assert bits_of(Account(exact=2000, dense=4000, n_elements=1000)) == 8
