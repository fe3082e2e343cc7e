"""A session of format version 1 goes on as it did when it was written (session_1.py)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.closeness import LAYERS, assert_near
from tests.golden.session_1 import EXPECTED, N_READ, SESSION, TOKENS, golden_model, held_by, next_logits

from karhunen.hf.cache import CompressedCache
from karhunen.hf.session import READ, VERSION, load_session


def test_it_is_of_version_1_and_holds_a_codec_of_version_2() -> None:
    text = (SESSION / "config.json").read_text(encoding="utf-8")
    assert json.loads(text)["version"] == 1 < VERSION
    assert READ == (1, VERSION)
    assert '"ByteQuantizer"' in text


def test_it_holds_what_it_held_and_goes_on_alike() -> None:
    model = golden_model()
    cache, state = load_session(model, SESSION)
    then = load_file(EXPECTED)
    logits = then.pop("logits")
    held = held_by(cache)
    assert held.keys() == then.keys()
    assert all(torch.equal(held[name], then[name]) for name in then)
    assert sum(name.endswith("planes") for name in then) == 4, "two layers, keys and values"
    assert state.tokens is not None
    assert torch.equal(state.tokens, TOKENS)
    assert cache.get_seq_length() == N_READ
    assert float(logits.abs().max()) > 0.01, "a share of nothing is nothing"
    assert_near(next_logits(model, cache), logits, LAYERS)


def test_saved_again_it_is_of_this_version(tmp_path: Path) -> None:
    model = golden_model()
    cache = CompressedCache.load(model, SESSION)
    cache.save(tmp_path / "again", TOKENS)
    assert json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))["version"] == VERSION
    assert load_session(model, tmp_path / "again")[1].dtype == "float32"


def test_its_vectors_say_in_which_dtype_the_model_was() -> None:
    with pytest.raises(ValueError, match="made by a model in float32, this one is in bfloat16"):
        CompressedCache.load(golden_model().bfloat16(), SESSION)
