"""The settings that recipes list at their rates: no straw man."""

import pytest
import torch

from karhunen.evaluation.results.rates import rated, settings
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.base import QuantizerData
from karhunen.recipes import make, names

CLIPS = (0.75, 0.79, 0.83, 0.88, 0.92, 0.94, 0.96, 0.98, 0.99, 1.0)


def gaussian_error(bits: int, clip: float) -> float:
    y = torch.randn(1, 1, 400, 64, generator=torch.Generator().manual_seed(0))
    quantizer = Affine(PerToken(), clip=clip).fit(QuantizerData(torch.full((1, 64), float(bits))))
    return float((quantizer.decode(quantizer.encode(y)) - y).square().mean())


@pytest.mark.parametrize("name", ["quarot", "spinquant", "rotatekv", "oscar", "nova_kv"])
def test_ranges_are_clipped_where_a_rotated_vector_errs_least(name: str) -> None:
    """A rotation makes coefficients Gaussian; at every rate the clip is within 15 % of the best of all clips."""
    for rate, options in settings(name).items():
        side = make(name, **options).value
        assert side is not None
        assert isinstance(side.quantizer, Affine)
        bits = int(side.allocation.bits)  # type: ignore[attr-defined]
        best = min(gaussian_error(bits, clip) for clip in CLIPS)
        assert gaussian_error(bits, side.quantizer.clip) < 1.15 * best, f"{name} at {rate}×"


def test_a_whole_range_at_one_bit_errs_more_than_zeros() -> None:
    """Why no per-channel method lists one bit: its two points are the extremes, and zeros err by the variance, 1."""
    assert gaussian_error(1, 1.0) > 2
    for name in ("kivi", "kitty", "ott"):
        assert 12 not in settings(name)


@pytest.mark.parametrize("name", names())
def test_every_listed_setting_makes_a_recipe(name: str) -> None:
    for options in settings(name).values():
        assert make(name, **options).name == name


def test_a_rate_that_no_recipe_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="rate 7 is none of those"):
        rated(["karhunen"], [8, 7])
