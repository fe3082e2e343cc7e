import pytest
import torch
from tests.synthetic import SMALL, cached, codec

from karhunen.evaluation.results.composition import coefficient_bits
from karhunen.evaluation.scores.attention_error import Captured
from karhunen.evaluation.scores.coordinates import FRACTIONS, coordinates
from karhunen.quantizers.base import QuantizerData
from karhunen.quantizers.byte_vq import ByteVQ


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


def test_bits_of_a_byte_are_those_of_the_coefficients_it_covers() -> None:
    """Rates of a falling spectrum: the bits sum to whole bytes, and what stands higher gets more."""
    rates = torch.tensor([[5.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.6, 0.4]], dtype=torch.float64)
    samples = torch.randn(1, 600, 8, generator=torch.Generator().manual_seed(0)) * 2 ** rates[0].float()
    quantizer = ByteVQ(n_iterations=1).fit(QuantizerData(rates, None, samples))
    bits = coefficient_bits(quantizer, 1, 8)
    assert float(bits.sum()) == 8 * len(quantizer.widths) == 16
    assert bits[0, 0] == bits.max() > bits[0, -1] == bits.min() > 0


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
