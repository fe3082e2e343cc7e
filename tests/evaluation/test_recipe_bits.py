"""What `karhunen recipes` says a recipe takes is what it takes."""

import pytest
from benchmarks.recipe_bits import N_TOKENS, measured

from karhunen.evaluation.results.composition import measured_bits, recipe_rows
from karhunen.recipes import names


def test_every_recipe_is_listed_with_measured_bits() -> None:
    assert sorted(measured_bits()["bits"]) == names()
    assert all(row.measured_bits["all"] > 0 for row in recipe_rows())
    assert measured_bits()["provenance"]["commit"]
    assert measured_bits()["what"].startswith("Synthetic vectors: ")


@pytest.mark.parametrize("name", ["full", "fp8", "int4", "kivi", "kitty", "snapkv", "snapkv_int4", "streaming_llm"])
def test_listed_bits_are_those_of_bytes_held_now(name: str) -> None:
    assert measured(name) == measured_bits()["bits"][name]


# Of coded tokens, heads of 64: symbols, then side information as a share of the coefficients it serves.
RANGE, HALF = 32, 16  # bits of a float16 low end and step, and of one float16
BY_HAND = {
    "int8": 8 + RANGE / 64,
    "int4": 4 + RANGE / 64,
    "int2": 2 + RANGE / 64,
    "fp8": 8 + HALF / 64,
    "fp8_static": 8,
    "kivi": 2 + RANGE / 32,
    "ott": 2 + RANGE / 32,
    "kitty": (2 + 2 / 8 + RANGE / 32 + 8 * HALF / (64 * 32) + 2 + RANGE / 32) / 2,  # an eighth of channels, each named
    "kvquant": 3 + 2 * 32 / 128,  # one per cent of 128 is two outliers of 32 bits
    "quarot": 4 + RANGE / 64,
    "spinquant": 4 + RANGE / 64,
    "rotatekv": (2 + RANGE / 128 + 2 + RANGE / 64) / 2,  # keys of two heads share a range
    "oscar": 2 + RANGE / 64,
    "nova_kv": (2 + HALF / 64 + 2 + RANGE / 64) / 2,
    "turboquant": 4 + HALF / 64,
    "turboquant_prod": (4 + 2 * HALF / 64 + 4 + HALF / 64) / 2,  # norm and residual norm; norm
    "turboquant_k8v4": (8 + HALF / 64 + 4 + RANGE / 64) / 2,
    "turboquant_4bit": (4 + HALF / 64 + 4 + RANGE / 64) / 2,
    "turboquant_k3v4": (3 + HALF / 64 + 4 + RANGE / 64) / 2,
    "turboquant_3bit": (3 + HALF / 64 + 3 + RANGE / 64) / 2,
    "int4_per_token_head": 4 + RANGE / 64,
    "q8_0": 8 + HALF / 32,
    "q4_0": 4 + HALF / 32,
    "mlx": 4 + RANGE / 64,
    "nvfp4": 4 + 8 / 16,
    "exllamav3": 4 + HALF / 32,
    "innerq": 3 + HALF / 32,
    "octopus": (22 * 10 + HALF) / 64,  # 22 triplets of 4 + 4 + 2 bits, the last of one coefficient
    "mxfp4": 4 + 8 / 32,
    "polarquant": (8 * 4 + (4 + 2 + 1) * 2 + HALF) / 16,  # blocks of 16: 15 angles and a radius
    "polarquant_pairs": (4 + RANGE / 2 / 32 + 4 + RANGE / 32) / 2,  # a pair's radius has a range, its angle none
    "commvq": 2 + HALF / 64,
    "streaming_int4": 4 + RANGE / 64,
    "snapkv_int4": 4 + RANGE / 64,
    "palu": 0.5 * (3 + RANGE / 32),
    "spectra": 2.0,
    "aatc": 2.75,
    "karhunen": 2.0,
    "kvtc": 2.25,  # its budget before DEFLATE, which takes up to a tenth: the ends of a range are rare
}
# Of all tokens, where nothing is coded: tokens held, 16 bits each; sums of attention take 32 for a head's 128 scalars.
HELD_BY_HAND = {
    "full": 16.0,
    "streaming_llm": 16 * (4 + 1020) / N_TOKENS,
    "key_norm": 16 * 0.5,
    "snapkv": 16 * 1024 / N_TOKENS,
    "h2o": (16 + 32 / 128) * 416 / N_TOKENS,  # 20 % are 410 tokens, and whole pages leave
}


def test_every_recipe_has_a_number_known_beforehand() -> None:
    assert BY_HAND.keys() | HELD_BY_HAND.keys() == set(names())


@pytest.mark.parametrize("name", BY_HAND)
def test_coded_bits_are_those_counted_by_hand(name: str) -> None:
    slack = {"spectra": 0.04, "aatc": 0.04, "karhunen": 0.04, "palu": 0.02, "kvtc": 0.11}.get(name, 1e-4)
    assert measured_bits()["bits"][name]["coded"] == pytest.approx(BY_HAND[name], rel=slack)


@pytest.mark.parametrize("name", HELD_BY_HAND)
def test_bits_of_what_is_held_are_those_counted_by_hand(name: str) -> None:
    assert measured_bits()["bits"][name] == {"all": pytest.approx(HELD_BY_HAND[name], abs=1e-3), "coded": 0}
