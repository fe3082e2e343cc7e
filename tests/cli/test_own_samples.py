"""`calibrate --own-samples`: they are read beside the text, kept with --resume, and counted."""

import json
from pathlib import Path

from tests.cli.conftest import Command
from tests.cli.test_usage import assert_refused


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
