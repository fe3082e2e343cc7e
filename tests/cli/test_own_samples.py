"""`calibrate --own-samples`: they are read beside the text, kept with --resume, and counted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.cli.test_usage import assert_refused

from karhunen.cli.calibrate import Wanted


def test_own_samples_are_read_beside_the_text(karhunen: Command, model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words to measure a model on, over and over. " * 40)
    start = [
        "calibrate",
        "--model",
        model_folder,
        "--text",
        text,
        "--max-tokens",
        512,
        "--recipe",
        "spectra:bits=3,group=8,recent=16",
    ]
    more = [*start, "--own-samples", 200, "--resume", tmp_path / "kept"]
    plain = json.loads(karhunen(*start, "-o", tmp_path / "plain", "--json").out)
    done = karhunen(*more, "-o", tmp_path / "own", "--json")
    own = json.loads(done.out)
    assert plain["calibration"][0].startswith("512 tokens")
    assert own["calibration"][0].startswith("712 tokens")
    assert plain["codec_fingerprint"] != own["codec_fingerprint"]
    assert "writing its own text" in done.err
    (kept,) = (tmp_path / "kept").glob("own-samples-*.json")
    before = kept.stat().st_mtime_ns
    again = json.loads(karhunen(*more, "-o", tmp_path / "again", "--json").out)
    assert again["codec_fingerprint"] == own["codec_fingerprint"]
    assert kept.stat().st_mtime_ns == before, "what is kept is not drawn again"


def test_a_plan_counts_them(karhunen: Command, model_folder: Path) -> None:
    start = ["calibrate", "--model", model_folder, "--recipe", "spectra", "--plan", "--json"]
    few, many = (
        json.loads(karhunen(*start, "--max-tokens", 512, "--own-samples", n).out)["devices"][0]["statistics"]
        for n in (0, 8192)
    )
    assert many >= few


def test_saved_statistics_take_none(karhunen: Command, tmp_path: Path) -> None:
    done = karhunen("calibrate", "--statistics", tmp_path, "--own-samples", 100, "-o", tmp_path / "out")
    assert_refused(done, "--own-samples")


@pytest.mark.parametrize(
    ("given", "n"), [((), 8), ((Path("notes"),), 0)], ids=["beside the built-in text", "beside your text"]
)
def test_how_many_unless_it_is_said(given: tuple[Path, ...], n: int) -> None:
    wanted = Wanted(None, "m", "karhunen", given, 16, None, None, None, False, "float32", "cpu", 64, None, None, False)
    assert wanted.n_own == n
    assert replace(wanted, own_samples=3).n_own == 3
    assert replace(wanted, saved=Path("statistics")).n_own == 0
