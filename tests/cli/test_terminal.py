"""Every verb in a pseudo-terminal: no crash, no line wider than the terminal, one document with --json."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import save_tiny
from tests.cli.metered import watched
from tests.cli.terminal import ESCAPE, SOURCE, Shown, in_terminal, interrupted_in_terminal, read_to_end, run_in_terminal

from karhunen.cli import run
from karhunen.cli.screen import Screen, grid
from karhunen.evaluation.results.composition import recipe_rows
from karhunen.monitoring.exporter import CacheCollector, serve
from karhunen.monitoring.meter import Meter

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3|9)[0-7](?:;[0-9;]*)?m")
SPECTRA = "spectra:bits=3,group=8,recent=16"
SIZES = ["--prefill-tokens", "96", "--scored-tokens", "32", "--generated-tokens", "4"]
LOADING = ("calibrate", "generate", "demo", "fold", "evaluate", "leaderboard", "bench", "verify")  # these load a model
LENIENT = (
    "--prefill-tokens", "200", "--scored-tokens", "32", "--documents", "1", "--max-kl", "99", "--max-kl-p999", "99",
    "--max-kl-pages", "99", "--min-top1", "0", "--min-needles", "0", "--min-calls", "0", "--dry-run",
)  # fmt: skip
DRAWING = ("leaderboard", "report")  # these draw pictures, for seconds
VERBS = (*LOADING, "inspect", "report", "compare", "doctor", "recipes", "plan", "prefix", "watch")
ENGINES = ("serve",)
"""Verbs that start an engine, which these tests have not: tests/serving."""
WORKING = (*DRAWING, "verify", "demo", "evaluate")  # these take seconds: one width each, the other is a long test


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for the demo's document."""
    return save_tiny(tmp_path_factory.mktemp("terminal") / "llama", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def codec(model: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal") / "codec"
    start = ["calibrate", "--model", str(model), "--text", str(text_file), "--max-tokens", "1024"]
    assert run([*start, "--recipe", SPECTRA, "-o", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def results(model: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal") / "results"
    recipes = ["--recipe", "int8:group=12,recent=16", "--recipe", "int2:group=12,recent=16"]
    start = ["evaluate", "--model", str(model), "--task", str(text_file), "--limit", "1"]
    assert run([*start, *SIZES, *recipes, "--results", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def exporter() -> Iterator[str]:
    """The address of a process's series: two layers of a cache, metered."""
    collector = CacheCollector(meter=Meter())
    cache = watched(collector)
    yield f"http://127.0.0.1:{serve(collector, 0)}/metrics"
    cache.close()


@pytest.fixture
def command(
    model: Path, text_file: Path, codec: Path, results: Path, exporter: str, tmp_path: Path
) -> Callable[[str], list[str]]:
    """A verb with arguments that let it do its whole work on a tiny model."""
    of_model, text = ["--model", str(model)], ["--text", str(text_file)]
    out = ["-o", str(tmp_path / "out")]
    few = ["--limit", "1", *SIZES, "--recipe", "int2:group=12,recent=16"]
    commands = {
        "calibrate": [*of_model, *text, *out, "--max-tokens", "1024", "--recipe", SPECTRA],
        "generate": [*of_model, "--codec", str(codec), "-p", "say something " * 8, "--max-new-tokens", "40"],
        "demo": [*of_model, "--recipe", "int8:group=12,recent=16", "--calibration-tokens", "512",
                 "--prompt-tokens", "200", "--scored-tokens", "16"],
        "fold": [*of_model, *text, *out, "--codec", str(codec), "--max-tokens", "1024"],
        "evaluate": [*of_model, "--task", str(text_file), *few, "--results", str(tmp_path / "results")],
        "leaderboard": [*of_model, "--results", str(results), *SIZES, "--recipe", "full", "--rate", "8", *out],
        "bench": [*of_model, "--codec", str(codec), "--tokens", "64", "--rounds", "1"],
        "verify": [str(codec), *of_model, *text, *LENIENT, "--quick"],
        "inspect": [str(codec)],
        "report": [str(results), *out],
        "compare": ["int8", "int2", "--results", str(results)],
        "doctor": [],
        "recipes": [],
        "plan": ["gemma3-4b", "--memory", "24GiB", "--bandwidth", "1TB/s", "--recipe", "karhunen:bits=2"],
        "prefix": ["ls", "--store", str(tmp_path / "pages")],
        "watch": [exporter, "--count", "2", "--every", "0.05"],
    }  # fmt: skip
    return lambda verb: [verb, *commands[verb]]


def assert_readable(shown: Shown, columns: int) -> None:
    assert shown.code == 0, shown.text
    assert "Traceback" not in shown.text
    assert "unexpected" not in shown.text
    assert shown.lines, "something was shown"
    for line in shown.lines:
        assert len(line) <= columns, f"{len(line)} columns: {line!r}"


def test_the_verbs_are_all_of_them() -> None:
    from typer.main import get_command

    from karhunen.cli.app import app

    assert sorted([*VERBS, *ENGINES]) == sorted(get_command(app).commands)


def in_columns() -> Iterator[Any]:
    """Every verb in both widths; of those that take seconds every second one is wide, the others narrow."""
    for verb in VERBS:
        for columns in (80, 60):
            is_long = verb in WORKING and columns != (80, 60)[WORKING.index(verb) % 2]
            marks = [pytest.mark.long] if is_long else [pytest.mark.slow] if verb in WORKING else []
            yield pytest.param(verb, columns, marks=marks)


@pytest.mark.parametrize(("verb", "columns"), list(in_columns()))
def test_every_verb_fits_its_terminal(command: Callable[[str], list[str]], verb: str, columns: int) -> None:
    shown = run_in_terminal(command(verb), columns)
    assert_readable(shown, columns)
    assert shown.sent.rfind(SHOW_CURSOR) >= shown.sent.rfind(HIDE_CURSOR), "the cursor is there again"


@pytest.mark.parametrize("verb", [pytest.param(v, marks=pytest.mark.long) if v in WORKING else v for v in VERBS])
def test_a_terminal_that_cannot_redraw_gets_lines(
    command: Callable[[str], list[str]], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown = run_in_terminal(command(verb), 60)
    assert_readable(shown, 60)
    assert "\x1b" not in shown.sent
    if verb == "calibrate":
        assert re.search(r"calibrating: [\d,]+ of [\d,]+ tokens, [\d,]+/s", " ".join(shown.text.split()))


@pytest.mark.parametrize("verb", ["calibrate", "generate", "inspect"])
def test_no_color_means_none(command: Callable[[str], list[str]], verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = run_in_terminal(command(verb), 80).sent
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run_in_terminal(command(verb), 80)
    assert_readable(plain, 80)
    assert not COLOUR.search(plain.sent)
    if verb != "inspect":
        assert COLOUR.search(coloured), "otherwise there is one"


@pytest.mark.parametrize(
    "verb", [pytest.param(v, marks=pytest.mark.long) if v in WORKING else v for v in VERBS if v not in DRAWING]
)
def test_with_json_stdout_is_one_document_while_progress_goes_to_the_terminal(
    command: Callable[[str], list[str]], verb: str, tmp_path: Path
) -> None:
    shown = run_in_terminal([*command(verb), "--json"], 80, out=tmp_path / "stdout")
    assert shown.code == 0, shown.text
    assert isinstance(json.loads(shown.out), dict)
    assert "\x1b" not in shown.out
    assert all(len(line) <= 80 for line in shown.lines), shown.text
    assert bool(shown.lines) == (verb in LOADING), "progress is shown, results are not"


@pytest.mark.parametrize("verb", ["calibrate", "generate", "recipes"])
def test_a_pipe_gets_the_result_whole_and_uncoloured(
    command: Callable[[str], list[str]], verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # of the caller's other programs; a pipe is a pipe
    shown = run_in_terminal(command(verb), 60, out=tmp_path / "stdout")
    assert shown.code == 0, shown.text
    assert shown.out.strip()
    assert "\x1b" not in shown.out
    if verb == "calibrate":
        assert len(shown.out.splitlines()) == 1, "a line that programs read is not broken"


def test_a_progress_bar_says_how_far_how_fast_and_what_is_left() -> None:
    def work() -> int:
        with Screen(as_json=False).progress("calibrating", "tokens", waiting="loading") as advance:
            for done in (0, 2048, 8192, 16384):
                time.sleep(0.25)  # more than a frame
                advance(done, 16384)
        return 0

    for columns in (80, 60):
        shown = in_terminal(work, columns)
        assert max(len(line) for line in shown.lines) <= columns
        assert re.search("loading +━", shown.text), "before there is a total"
        said = re.findall(r"calibrating ([━╸╺ ]+) ([\d,]+) of 16,384 tokens, ([\d,]+)/s, (\d+) s left", shown.text)
        assert {done for _, done, *_ in said} == {"2,048", "8,192"}
        assert all(len(bar) >= 5 for bar, *_ in said)


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_that_does_not_know_its_size_is_taken_for_80_columns(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `ssh -tt` or `docker run -t` without a terminal on the other side."""
    monkeypatch.setenv("TERM", term)
    shown = run_in_terminal(["recipes"], 0)
    assert_readable(shown, 80)
    assert "karhunen" in shown.text


def test_the_title_of_a_list_is_on_one_line() -> None:
    def work() -> int:
        table = grid("layer", *(f"column{i}" for i in range(9)), title="a title that is wider than the list below")
        table.add_row(*map(str, range(10)))
        Screen(as_json=False).table(table)
        return 0

    assert in_terminal(work, 60).lines[0].strip() == "a title that is wider than the list below"


def test_a_bit_plan_is_a_table_in_a_narrow_terminal(codec: Path) -> None:
    """As a list it would take ten lines for each side of each layer."""
    shown = run_in_terminal(["inspect", str(codec)], 60).text
    plan = shown.split("bit plan")[1].split("storage plan")[0]
    assert len([line for line in plan.splitlines() if line.startswith("│")]) <= 2 * 2 * 2, "layers, sides, heads"


def test_recipes_are_readable_in_a_narrow_terminal() -> None:
    shown = run_in_terminal(["recipes"], 60)
    words = set(shown.text.split())
    for row in recipe_rows():
        assert f"recipe {row.name}" in {line.strip() for line in shown.lines}
        for option, value in row.options.items():
            assert {f"{option}={value}", f"{option}={value},"} & words, "no word is cut in two"


def test_a_terminal_is_not_steered_by_what_a_model_says() -> None:
    def work() -> int:
        Screen(as_json=False).stream("one\ntwo\x1b]0;title\x07\x9b2J\r three")
        return 0

    assert in_terminal(work, 80).sent.splitlines() == ["one", "two�]0;title��2J� three"]


LONG = ["--recipe", "karhunen:bits=2", "--max-tokens", "1000000"]
IN_THE_MIDDLE = {
    "calibrate": ([*LONG, "--keep-statistics", "-o", "out"], r"calibrating [━╸╺ ]+ [\d,]+ of"),
    "calibrate to resume": ([*LONG, "--resume", "partial", "-o", "out"], r"calibrating [━╸╺ ]+ [\d,]+ of"),
    "generate": (["-p", "say something", "--max-new-tokens", "3000", "--session", "chat"], r"makes one\s+\S"),
    "evaluate": ([*SIZES, "--results", "out"], r"measuring \d+ statistics"),
    "evaluate in two processes": ([*SIZES, "--results", "out", "--jobs", "2"], r"recipes in 2 processes"),
}  # fmt: skip


OFTEN = ("calibrate", "evaluate in two processes")  # the others are long tests


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [what if what in OFTEN else pytest.param(what, marks=pytest.mark.long) for what in IN_THE_MIDDLE]
)
def test_ctrl_c_in_the_middle_of_work_is_one_line_and_leaves_nothing_behind(
    what: str, model: Path, codec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    long = Path("long.txt")
    long.write_text(" ".join(f"line {i} of a text that nobody has to read." for i in range(20_000)))
    verb, (rest, when) = what.split()[0], IN_THE_MIDDLE[what]
    inputs = {
        "calibrate": ["--text", str(long)],
        "generate": ["--codec", str(codec)],
        "evaluate": ["--task", str(long)],
    }
    shown = interrupted_in_terminal([verb, "--model", str(model), *inputs[verb], *rest], 80, when)
    assert shown.code == 130, shown.text
    assert shown.lines[-1] == "karhunen: interrupted"
    assert shown.text.count("karhunen: ") == 1
    assert "Traceback" not in shown.text
    assert "KeyboardInterrupt" not in shown.text
    assert shown.sent.rfind(SHOW_CURSOR) >= shown.sent.rfind(HIDE_CURSOR), "the cursor is there again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.txt"], "nothing was begun that is not whole"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_verbs_and_options(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "bash": {"COMP_WORDS": "karhunen cal", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "karhunen cal"},
        "fish": {"_TYPER_COMPLETE_ARGS": "karhunen cal", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    command = [sys.executable, "-m", "karhunen"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **words[shell], "_KARHUNEN_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "calibrate" in done.stdout
    assert "generate" not in done.stdout


def test_the_completion_of_a_shell_is_shown(tmp_path: Path) -> None:
    """The script that asks as above, from the shell that runs the command."""
    code = f"{sys.executable} -m karhunen --show-completion; echo $?"
    done = subprocess.run(
        ["bash", "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "SHELL": "/bin/bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "0", done.stderr
    assert "_KARHUNEN_COMPLETE=complete_bash" in done.stdout
    assert "complete -o default -F _karhunen_completion karhunen" in done.stdout


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_the_command_itself_runs_in_a_terminal(term: str) -> None:
    """Numba starts colorama, which would end the program with an escape code."""
    pytest.importorskip("colorama")
    ours, theirs = pty.openpty()
    as_numba_does = "import colorama; colorama.init(); colorama.deinit()"
    command = [sys.executable, "-c", f"{as_numba_does}; from karhunen.cli import main; main()", "recipes"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "60", "TERM": term}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    sent = read_to_end(ours)
    os.close(ours)
    assert child.wait() == 0
    assert "recipe karhunen" in sent
    assert term != "dumb" or "\x1b" not in sent
    assert max(map(len, ESCAPE.sub("", sent).splitlines())) <= (80 if term == "dumb" else 60)
