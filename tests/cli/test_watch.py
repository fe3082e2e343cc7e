"""`watch` and `generate --watch`: figures are the caches' own; in a terminal and in a pipe."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.cli.metered import N_CODED, N_TOKENS, watched
from tests.cli.terminal import run_in_terminal

from karhunen.cli.dashboard import blocks
from karhunen.hf.cache import CompressedCache
from karhunen.monitoring.exporter import CacheCollector, serve
from karhunen.monitoring.meter import Meter

Exported = tuple[str, CompressedCache, Meter]


@pytest.fixture(scope="module")
def exported() -> Iterator[Exported]:
    meter = Meter()
    collector = CacheCollector(meter=meter)
    cache = watched(collector)
    yield f"http://127.0.0.1:{serve(collector, 0)}/metrics", cache, meter
    cache.close()


def test_what_it_shows_is_what_the_cache_reports(karhunen: Command, exported: Exported) -> None:
    address, cache, meter = exported
    done = karhunen("watch", address, "--json")
    assert done.code == 0, done.err
    said, total = json.loads(done.out), cache.report().total
    assert (said["dense_bytes"], said["held_bytes"]) == (total.dense, total.held)
    assert said["bytes"] == {"codes": total.codes, "side": total.side, "exact": total.exact}
    assert (said["tokens"], said["coded_tokens"], said["encoded_tokens"]) == (N_TOKENS, N_CODED, N_CODED)
    wanted = {str(layer.layer): layer.account.bits_per_element for layer in cache.report().layers}
    assert said["bits_by_layer"] == pytest.approx(wanted, rel=1e-5)
    moved = {str(layer): found.delta for layer, found in meter.moved.items()}
    assert said["attention_accuracy_delta"] == pytest.approx(moved, rel=1e-5)
    assert said["drift"] is None


def test_a_pipe_gets_a_line_for_every_look(karhunen: Command, exported: Exported) -> None:
    address, cache, _ = exported
    done = karhunen("watch", address, "--count", 3, "--every", 0.01)
    lines = done.out.splitlines()
    assert len(lines) == 3
    assert f"{N_TOKENS} tokens, {N_CODED} coded" in lines[0]
    assert f"({cache.report().total.ratio:.2f}x)" in lines[0]
    assert "\x1b" not in done.out


@pytest.mark.parametrize("columns", [80, 60])
def test_a_terminal_gets_a_frame_that_is_drawn_again_in_its_place(exported: Exported, columns: int) -> None:
    address, cache, _ = exported
    shown = run_in_terminal(["watch", address, "--count", "3", "--every", "0.05"], columns)
    assert shown.code == 0, shown.text
    assert max(map(len, shown.lines)) <= columns
    assert shown.text.count("karhunen watch") >= 3
    assert re.search(r"\x1b\[\d*A", shown.sent), "the cursor goes up"
    assert f"{cache.report().total.ratio:.2f} times smaller" in shown.text


@pytest.mark.parametrize(
    ("address", "said"),
    [("localhost:1", "no address"), ("http://127.0.0.1:9/metrics", "does not answer"), ("", "empty")],
)
def test_an_address_where_nobody_answers_is_refused(karhunen: Command, address: str, said: str) -> None:
    done = karhunen("watch", address)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf"])
def test_time_goes_on(karhunen: Command, exported: Exported, every: str) -> None:
    assert karhunen("watch", exported[0], "--every", every).code == 2


def test_generate_shows_its_cache_and_then_says_the_same_text(
    karhunen: Command, model_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words to measure a model on, over and over. " * 40)
    made = karhunen("calibrate", "--model", model_folder, "--text", text, "--max-tokens", 800,
                    "--recipe", "int2:group=12,recent=16", "-o", tmp_path / "codec")  # fmt: skip
    assert made.code == 0, made.err
    start = ["generate", "--model", str(model_folder), "--codec", str(tmp_path / "codec"), "--prompt", "say it " * 9]
    start += ["--max-new-tokens", "24", "--raw"]
    plain, seen = (json.loads(karhunen(*start, *more, "--json").out) for more in ((), ("--watch",)))
    assert plain["text"] == seen["text"]
    assert "watched" not in plain
    watched_bytes = seen["watched"]
    assert watched_bytes["held_bytes"] == seen["cache"]["bytes"]["held"] == plain["cache"]["bytes"]["held"]
    assert watched_bytes["encoded_tokens"] == seen["cache"]["layers"][0]["n_coded"] > 0
    assert all(0 < delta < 2 for delta in watched_bytes["attention_accuracy_delta"].values())
    for columns in (80, 60):
        shown = run_in_terminal([*start, "--watch"], columns)
        assert shown.code == 0, shown.text
        assert max(map(len, shown.lines)) <= columns
        assert "karhunen watch" in shown.text


def test_blocks_are_as_high_as_their_share() -> None:
    assert blocks([0.0, 2.0, 8.0, 15.9, 16.0], 16.0, 10) == "▁▂▅██"
    assert blocks([1.0] * 100, 16.0, 20) == "▁" * 20
