"""A slice of the table of docs/reliability.md, and that its checks see what they are there for."""

import dataclasses
from typing import Any

import pytest
import torch
from tests.hf import cells
from tests.hf.cells import CLOSE, EXACT, cell_of, codec, eight_bits
from tests.hf.families import MODELS

from karhunen.codec import Codec

SLICE = {
    "Qwen3": ["full", "nova_kv"],
    "Gemma 3": ["karhunen"],
    "Gemma 4": ["int4"],
    "Bloom": ["int4", "snapkv"],
    "LFM2": ["kivi"],
    "MiniCPM3": ["karhunen", "nova_kv"],
    "Mamba": ["snapkv"],
}
REFUSED = {
    ("Bloom", "snapkv"): "ALiBi",
    ("MiniCPM3", "nova_kv"): "latent attention",
    ("Mamba", "snapkv"): "has no attention cache to compress",
}


@pytest.mark.parametrize(("family", "recipe"), [(family, recipe) for family in SLICE for recipe in SLICE[family]])
def test_a_cell_is_right_or_refused_before_any_work(family: str, recipe: str) -> None:
    cell = cell_of(family, recipe)
    assert not cell.wrong
    if (reason := REFUSED.get((family, recipe))) is not None:
        assert reason in cell.refused
    else:
        assert cell.error is not None
        assert cell.error <= (EXACT if recipe == "full" else CLOSE)


def exchanged_layers(made: Codec) -> Codec:
    first, second = (made.layers[index] for index in (0, 1))
    return dataclasses.replace(made, layers={0: second, 1: first})


def exchanged_sides(made: Codec) -> Codec:
    layers = {i: dataclasses.replace(x, key=x.value, value=x.key) for i, x in made.layers.items()}
    return dataclasses.replace(made, layers=layers)


@pytest.mark.parametrize("change", [exchanged_layers, exchanged_sides])
def test_what_is_exchanged_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family, recipe = "Qwen3", eight_bits("karhunen")
    made = codec(family, recipe)
    monkeypatch.setattr(cells, "codec", lambda *_: change(made))
    with torch.no_grad():
        assert "from the uncompressed model" in cell_of(family, "karhunen").wrong


def test_every_family_is_named_once() -> None:
    assert len(MODELS) >= 50
