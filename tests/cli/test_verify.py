"""`verify`: a verdict that can be trusted, kept in the codec, shown wherever it is loaded."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.cli.terminal import run_in_terminal
from tests.cli.test_usage import assert_refused

from karhunen.card import Gate, ReportCard
from karhunen.evaluation.verify import Limits

SMALL = ["--prefill-tokens", 120, "--scored-tokens", 40, "--documents", 2, "--seed", 1]


@pytest.fixture(scope="module")
def codecs(codec_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A codec that changes nothing worth a word, and one that ruins everything."""
    from karhunen.cli import run

    made = {}
    for name, recipe in (("fine", "int8:recent=16"), ("coarse", "int2:recent=0,sink=0")):
        made[name] = tmp_path_factory.mktemp("verified") / name
        words = ["calibrate", "--statistics", codec_folder / "statistics", "--recipe", recipe, "-o", made[name]]
        assert run([str(word) for word in words]) == 0
    return made


def test_a_good_codec_passes_and_carries_its_card(
    karhunen: Command, codecs: dict[str, Path], model_folder: Path, text_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from karhunen.codec import Codec

    done = karhunen("verify", codecs["fine"], "--model", model_folder, "--text", text_file, *SMALL)
    assert done.code == 0, done.err
    for words in (
        "KL, mean",
        "top-1 agreement",
        "needles found",
        "tool calls",
        "passed",
        "inconclusive",
        "good enough",
    ):
        assert words in done.out
    with caplog.at_level(logging.INFO):
        codec = Codec.from_pretrained(codecs["fine"])
    assert "verified on llama (float32)" in caplog.text
    card = codec.card
    assert card is not None
    assert (card.codec, card.n_scored, card.passed) == (codec.fingerprint(), 80, True)
    assert [gate.status for gate in card.gates] == ["passed"] * 4 + ["inconclusive"] * 2
    assert card.gates[0].value < 0.01
    assert card.made["torch"]
    shown = karhunen("inspect", codecs["fine"])
    assert "report card: llama, float32" in shown.out
    said = json.loads(karhunen("inspect", codecs["fine"], "--json").out)["report_card"]
    assert said["passed"] is True
    assert said["gates"][0]["name"] == "KL, mean"
    assert "verified on llama" in karhunen("generate", "--codec", codecs["fine"], "--model", model_folder, "-p", "x",
                                           "--max-new-tokens", 1).err  # fmt: skip


def test_a_codec_that_ruins_answers_fails_with_exit_code_3(
    karhunen: Command, codecs: dict[str, Path], model_folder: Path, text_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["verify", codecs["coarse"], "--model", model_folder, "--text", text_file, *SMALL, "--max-kl", 0]
    dry = karhunen(*words, "--dry-run", "--json")
    assert dry.code == 3
    assert json.loads(dry.out)["passed"] is False
    assert json.loads(karhunen("inspect", codecs["coarse"], "--json").out)["report_card"] is None
    assert "no report card" in karhunen("inspect", codecs["coarse"]).out
    done = karhunen(*words)
    assert done.code == 3
    assert "failed" in done.out
    assert "not good enough" in done.out
    assert "failed" in karhunen("inspect", codecs["coarse"]).out
    caplog.clear()
    shown = karhunen("generate", "--codec", codecs["coarse"], "--model", model_folder, "-p", "x", "--max-new-tokens", 1)
    logged = f"{shown.err}{caplog.text}"
    assert logged.count("NOT good enough") == 1, "a warning is given once"
    (line,) = (line for line in logged.splitlines() if "NOT good enough" in line)
    assert "failed KL, mean: " in line
    assert f"all: `karhunen inspect {codecs['coarse']}`" in line
    assert "inconclusive" not in line
    assert "passed" not in line


def test_every_part_tells_how_far_it_is_in_a_pipe_and_in_a_terminal(
    karhunen: Command, codecs: dict[str, Path], model_folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from karhunen.cli import screen

    monkeypatch.setattr(screen, "PLAIN_INTERVAL_SECONDS", 0.0)
    words = ["verify", codecs["fine"], "--model", model_folder, "--text", text_file, *SMALL, "--dry-run"]
    lines = karhunen(*words).err.splitlines()
    n_tokens = 2 * (120 + 3 * 40)
    assert f"texts: {n_tokens} tokens" in lines
    told = [line for line in lines if line.startswith("texts: ") and " of " in line]
    assert len(told) > 10
    assert f"{n_tokens} of {n_tokens} tokens" in told[-1]
    shown = run_in_terminal([str(word) for word in words], columns=100)
    assert shown.code == 0
    assert "of 480 tokens" in shown.text
    assert "s left" in shown.text


def test_a_quick_run_is_small_marked_and_never_takes_a_full_ones_place(
    karhunen: Command, codecs: dict[str, Path], model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    from karhunen.codec import Codec
    from karhunen.hf.hub import card_text

    shutil.copytree(codecs["fine"], tmp_path / "codec")
    codec = Codec.from_pretrained(tmp_path / "codec")
    replace(codec, card=None).save_pretrained(tmp_path / "codec")
    words = ["verify", tmp_path / "codec", "--model", model_folder, "--text", text_file, *SMALL]
    quick = karhunen(*words, "--quick")
    assert quick.code == 0, quick.err
    assert "quick report card: llama" in quick.out
    assert "good enough by a quick run; one without --quick says more" in quick.out
    card = Codec.from_pretrained(tmp_path / "codec").card
    assert card is not None
    assert (card.quick, card.n_scored) == (True, 40)
    assert card.line.startswith("quickly verified on llama (float32)")
    assert "quick report card" in karhunen("inspect", tmp_path / "codec").out
    assert json.loads(karhunen("inspect", tmp_path / "codec", "--json").out)["report_card"]["quick"] is True
    assert "`karhunen verify --quick` on llama" in card_text(replace(codec, card=card))
    assert karhunen(*words).code == 0
    again = karhunen(*words, "--quick")
    assert "keeps the report card of its full run" in again.out
    kept = Codec.from_pretrained(tmp_path / "codec").card
    assert kept is not None
    assert (kept.quick, kept.n_scored) == (False, 80)


def test_a_card_is_not_kept_by_another_codec(codecs: dict[str, Path], tmp_path: Path) -> None:
    from karhunen.codec import Codec

    fine, coarse = Codec.from_pretrained(codecs["fine"]), Codec.from_pretrained(codecs["coarse"])
    card = ReportCard(fine.fingerprint(), "m", "float32", (), 1, 8.0, 2.0, (), {})
    with pytest.raises(ValueError, match="report card is that of codec"):
        replace(coarse, card=card).save_pretrained(tmp_path / "codec")
    assert not (tmp_path / "codec").exists()
    assert not card.passed, "nothing was measured"


def test_wrong_usage_is_refused(karhunen: Command, codecs: dict[str, Path], model_folder: Path, tmp_path: Path) -> None:
    words = ["verify", codecs["fine"], "--model", model_folder]
    assert_refused(karhunen(*words, "--text", tmp_path / "nothing.txt"), "nothing.txt", "does not exist")
    assert_refused(karhunen(*words, "--min-top1", 2), "--min-top1")
    assert_refused(karhunen("verify", tmp_path / "nothing"), "no artifact")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert_refused(karhunen(*words, "--text", short, *SMALL), "no text is long enough")


def test_a_gate_is_passed_failed_or_says_why_it_says_nothing() -> None:
    assert Gate("KL", 0.01, 0.02, at_least=False).status == "passed"
    assert Gate("KL", 0.03, 0.02, at_least=False).status == "failed"
    assert Gate("top-1", 0.94, 0.95, at_least=True).line == "top-1: 0.94 (≥ 0.95) failed"
    assert Gate("needles", 0.5, 0.9, at_least=True, reason="too hard").status == "inconclusive"
    assert Gate("calls", 0.9, 0.9, at_least=True, note="9 of 10").said == "passed: 9 of 10"


def test_a_card_in_one_line_names_what_failed_and_no_more() -> None:
    gates = (
        Gate("KL, mean", 0.003, 0.02, at_least=False, unit="nats"),
        Gate("top-1 agreement", 0.93, 0.95, at_least=True),
        Gate("needles found", 0.0, 0.9, at_least=True, reason="the uncompressed model itself finds none of them"),
    )
    card = ReportCard("c", "SmolLM2", "float32", (), 1152, 2.0, 8.0, gates, {})
    failed = "NOT good enough on SmolLM2 (float32), 8.0 times smaller: failed top-1 agreement: 0.93 (≥ 0.95)"
    assert card.line == failed
    good = replace(card, gates=gates[::2])
    assert good.line == "verified on SmolLM2 (float32), 8.0 times smaller: 1 of 2 gates passed, 1 inconclusive"


@pytest.mark.parametrize("name", ["kl", "kl_p999", "pages", "top1", "needles", "tool_calls"])
def test_a_limit_that_is_no_number_is_refused(name: str) -> None:
    """Nothing is above it, and every gate would pass."""
    with pytest.raises(ValueError, match="nan"):
        Limits(**{name: float("nan")})
