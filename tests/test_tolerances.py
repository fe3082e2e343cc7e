"""No test judges a difference by a fixed number: what is close depends on the size of what is compared."""

import re
from pathlib import Path

import pytest
import torch
from tests.closeness import SUM, assert_near

FIXED = re.compile(r"atol=(?!0\b(?!\.))(?!share \* size\b)")


def test_no_test_has_a_tolerance_of_a_fixed_size() -> None:
    found = [
        f"{file.name}:{number}"
        for file in sorted(Path(__file__).parent.rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if FIXED.search(line) and file != Path(__file__)
    ]
    assert not found, "use tests/closeness.py"


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_a_difference_counts_by_the_largest_number_beside_it(size: float) -> None:
    expected = size * torch.tensor([2.0, 1e-9, 0.0])
    assert_near(expected + size * torch.tensor([0.0, 1.4e-6, -1.4e-6]), expected, SUM)
    for off in (torch.tensor([0.0, 1e-4, 0.0]), torch.tensor([torch.nan, 0.0, 0.0])):
        with pytest.raises(AssertionError):
            assert_near(expected + size * off, expected, SUM)
    with pytest.raises(AssertionError, match="is not"):
        assert_near(expected[:1], expected[:2], SUM)
    with pytest.raises(AssertionError):
        assert_near(torch.zeros(3), torch.tensor([torch.inf, 0.0, 0.0]), SUM)
