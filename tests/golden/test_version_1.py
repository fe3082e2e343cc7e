"""An artifact of format version 1 gives what it gave when it was made (version_1.py)."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.closeness import LAYERS, SUM, assert_near
from tests.golden.version_1 import ARTIFACT, EXPECTED, given_by, held_by

from karhunen.attention.reader import reader_of
from karhunen.codec import VERSION, Codec

GIVEN, THEN = given_by(Codec.from_pretrained(ARTIFACT)), load_file(EXPECTED)


def test_the_artifact_is_of_version_1() -> None:
    assert json.loads((ARTIFACT / "config.json").read_text(encoding="utf-8"))["version"] == 1 < VERSION


def test_nothing_more_and_nothing_less_is_given() -> None:
    assert GIVEN.keys() == THEN.keys()
    assert len(THEN) == 2 * (2 * 2 + 1), "two layers: coefficients and vectors of two sides, and attention"


@pytest.mark.parametrize("name", THEN)
def test_known_bytes_mean_what_they_meant(name: str) -> None:
    """Look-ups are exact but for the gain, a power that processors round to either neighbour. Transforms and softmax
    are sums, whose order the processor decides."""
    share = {"coefficients": 2**-23, "vectors": SUM, "attention": LAYERS}[name.rpartition(".")[2]]
    assert float(THEN[name].abs().max()) > 1, "a share of nothing is nothing"
    assert_near(GIVEN[name], THEN[name], share)


def test_saved_again_it_is_of_this_version_and_the_same_codec(tmp_path: Path) -> None:
    folder = tmp_path / "again"
    old = Codec.from_pretrained(ARTIFACT)
    old.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["version"] == VERSION
    assert Codec.from_pretrained(folder).fingerprint() == old.fingerprint()


def test_its_bytes_are_read_without_a_dense_copy() -> None:
    for layer in Codec.from_pretrained(ARTIFACT).layers.values():
        assert reader_of(layer, held_by(layer)).mode != "decoded"
