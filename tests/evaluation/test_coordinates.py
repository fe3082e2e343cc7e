import pytest
import torch
from tests.synthetic import SMALL, cached, codec

from karhunen.evaluation.attention_error import Captured
from karhunen.evaluation.coordinates import FRACTIONS, coordinates


def seen(name: str) -> list:
    key, value = cached(SMALL, 1, 512)
    return coordinates(codec(name), {0: Captured(key, value, key[:, :, -8:], 1.0, None, None, None)})


def test_curves_end_at_all_of_the_energy_and_a_transform_concentrates_it() -> None:
    for side in seen("spectra"):
        assert len(side.energy_before) == len(side.energy_after) == len(side.bits) == len(FRACTIONS)
        assert side.energy_before[0] == side.energy_after[0] == 0
        assert side.energy_before[-1] == pytest.approx(1, abs=1e-4)
        assert side.energy_after[-1] == pytest.approx(1, abs=1e-4)
        assert side.energy_after[4] > side.energy_before[4]
        assert list(side.bits) == sorted(side.bits, reverse=True)


def test_without_a_transform_nothing_changes() -> None:
    for side in seen("int4"):
        assert side.energy_after == pytest.approx(side.energy_before, abs=1e-4)
        assert side.correlation_after == pytest.approx(side.correlation_before, abs=1e-6)
        assert set(side.bits) == {4.0}


def test_uncorrelated_coordinates_of_equal_energy_make_a_straight_line() -> None:
    white = torch.eye(16).repeat(64, 1)[None, None] * 4 - 0.25
    named = {0: Captured(white, white, white, 1.0, None, None, None)}
    made = codec("int4")
    side = coordinates(made, named)[0]
    assert side.energy_before == pytest.approx(FRACTIONS, abs=1e-4)
    assert side.correlation_before == pytest.approx(1 / 15, abs=1e-6)
