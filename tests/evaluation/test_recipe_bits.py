"""What `karhunen recipes` says a recipe takes is what it takes."""

import pytest
from benchmarks.recipe_bits import N_TOKENS, measured

from karhunen.evaluation.composition import measured_bits, recipe_rows
from karhunen.recipes import names


def test_every_recipe_is_listed_with_measured_bits() -> None:
    assert sorted(measured_bits()["bits"]) == names()
    assert all(row.measured_bits["all"] > 0 for row in recipe_rows())
    assert measured_bits()["provenance"]["commit"]


@pytest.mark.parametrize("name", ["full", "fp8", "int4", "kivi", "kitty", "snapkv", "snapkv_int4", "streaming_llm"])
def test_listed_bits_are_those_of_bytes_held_now(name: str) -> None:
    assert measured(name) == measured_bits()["bits"][name]


def test_listed_bits_known_by_hand() -> None:
    bits = measured_bits()["bits"]
    assert bits["full"] == {"all": 16, "coded": 0}
    assert bits["int4"]["coded"] == 4.5
    assert bits["kivi"]["coded"] == 3.0
    assert bits["snapkv"]["all"] == 16 * 1024 / N_TOKENS
    assert bits["spectra"]["coded"] == pytest.approx(2.0, abs=0.04)
