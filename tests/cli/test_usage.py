"""Wrong usage and wrong inputs: exit code 2, one line on stderr, nothing on stdout, no traceback."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.cli.conftest import Command, Finished
from typer.main import get_command

from karhunen.cli.app import app


def assert_refused(done: Finished, *words: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith("karhunen: ")]
    assert len(lines) == 1, done.err
    assert done.err.rstrip("\n").splitlines()[-1] == lines[0], "the line is the last word"
    assert "Traceback" not in done.err
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], ["No such command", "frobnicate"]),
        (["calibrate"], ["--output"]),
        (["calibrate", "-o", "x", "--max-tokens", "many"], ["--max-tokens", "integer"]),
        (["calibrate", "-o", "x", "--max-tokens", "0"], ["--max-tokens"]),
        (["calibrate", "-o", "x", "--bits", "2"], ["--bits"]),
        (["inspect"], ["DIR"]),
        (["generate", "--prompt", "x"], ["--codec"]),
    ],
)
def test_a_wrong_usage_is_one_line_and_exit_code_2(karhunen: Command, arguments: list[str], words: list[str]) -> None:
    assert_refused(karhunen(*arguments), *words)


def takers_of_words() -> list[tuple[str, Any]]:
    """Every option and argument of every verb that takes a word or a path."""
    group: Any = get_command(app)
    return [
        (verb, parameter)
        for verb, command in group.commands.items()
        for parameter in command.params
        if re.search("str|Path", str(get_type_hints(command.callback).get(parameter.name)))
    ]


@pytest.mark.parametrize(("verb", "parameter"), takers_of_words(), ids=lambda x: getattr(x, "name", x))
def test_an_empty_word_is_refused_by_every_verb(
    karhunen: Command, verb: str, parameter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the current folder, nor the default."""
    monkeypatch.chdir(tmp_path)
    is_option = parameter.param_type_name == "option"
    for given in [[name] for name in parameter.opts] if is_option else [[]]:
        before = ["x"] if parameter.name in ("b", "others") else []
        done = karhunen(verb, *before, *given, "", *(["x"] if parameter.name == "a" else []))
        assert_refused(done, *given, "it is empty; give a", *([] if is_option else [f"'{parameter.metavar}'"]))
    assert not list(tmp_path.iterdir())


def test_the_words_that_may_not_be_empty_are_all_of_them() -> None:
    found = {(verb, parameter.name) for verb, parameter in takers_of_words()}
    assert {
        (verb, "model") for verb in ("calibrate", "generate", "evaluate", "bench", "demo", "fold", "verify")
    } <= found
    assert {("generate", "session"), ("generate", "codec"), ("inspect", "codec"), ("compare", "a")} <= found
    assert {("report", "results"), ("evaluate", "tasks"), ("calibrate", "output"), ("calibrate", "recipe")} <= found
    assert ("generate", "top_p") not in found


@pytest.mark.parametrize("value", ["0", "-0.5", "1.01", "nan", "inf", "half", ""])
def test_top_p_is_above_0_and_at_most_1(karhunen: Command, value: str) -> None:
    """Refused before the codec is looked for, which is not there."""
    done = karhunen("generate", "--codec", "nowhere", "-p", "x", "--top-p", value)
    assert_refused(done, "--top-p", repr(value), "above 0 and at most 1")
    assert "nowhere" in karhunen("generate", "--codec", "nowhere", "-p", "x", "--top-p", "1").err


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "warm"])
def test_a_temperature_is_0_or_more(karhunen: Command, value: str) -> None:
    done = karhunen("generate", "--codec", "nowhere", "-p", "x", "--temperature", value)
    assert_refused(done, "--temperature", repr(value), "0 or more")


def takers_of_numbers() -> list[tuple[str, Any]]:
    """Every option of every verb that takes a number with a fraction."""
    group: Any = get_command(app)
    return [
        (verb, parameter)
        for verb, command in group.commands.items()
        for parameter in command.params
        if "float" in str(get_type_hints(command.callback).get(parameter.name))
    ]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999"])
@pytest.mark.parametrize(("verb", "parameter"), takers_of_numbers(), ids=lambda x: getattr(x, "name", x))
def test_no_number_is_infinite_or_none(karhunen: Command, verb: str, parameter: Any, value: str) -> None:
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    before = ["x"] if any(p.param_type_name == "argument" for p in command.params) else []
    codec = ["--codec", "x"] if verb == "generate" else []
    assert_refused(karhunen(verb, *before, *codec, parameter.opts[0], value), parameter.opts[0], repr(value))


def test_the_numbers_with_fractions_are_all_of_them() -> None:
    found = {(verb, parameter.name) for verb, parameter in takers_of_numbers()}
    assert {("verify", "max_kl"), ("verify", "min_top1"), ("plan", "ratio"), ("bench", "bits")} <= found


def test_help_says_which_top_p_holds(karhunen: Command) -> None:
    said = " ".join(karhunen("generate", "--help").out.split())
    assert "--top-p FLOAT Above 0 and at most 1; 1 keeps all tokens." in said


def test_a_wrong_usage_names_the_help_of_its_verb(karhunen: Command) -> None:
    assert_refused(karhunen("generate", "--frobnicate"), "`karhunen generate --help`")


@pytest.mark.parametrize("verb", ["calibrate", "demo"])
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("frobnicate", ["unknown recipe", "frobnicate", "`karhunen recipes`"]),
        ("spectre", ["unknown recipe", "did you mean spectra?"]),
        ("spectra:bitz=2", ["spectra", "bitz", "value_bits"]),
        ("spectra:bits", ["bits", "no value"]),
        ("spectra:bits=17", ["17"]),
        ("spectra:bits=two", ["spectra"]),
        ("quarot:clip=0.1", ["0.1"]),
    ],
)
def test_an_unknown_recipe_or_option_lists_the_known_ones(
    karhunen: Command, verb: str, recipe: str, words: list[str], tmp_path: Path
) -> None:
    output = ["-o", tmp_path / "codec"] if verb == "calibrate" else []
    assert_refused(karhunen(verb, "--recipe", recipe, *output), *words)
    assert not (tmp_path / "codec").exists()


def test_a_missing_artifact_is_refused(karhunen: Command, tmp_path: Path) -> None:
    for as_json in ([], ["--json"]):
        assert_refused(karhunen("inspect", tmp_path / "nothing", *as_json), "nothing", "calibrate")
    assert_refused(karhunen("generate", "--codec", tmp_path / "nothing", "-p", "x"), "nothing")
    assert_refused(karhunen("calibrate", "--statistics", tmp_path / "nothing", "-o", tmp_path / "c"), "nothing")


def test_a_truncated_artifact_is_refused(karhunen: Command, codec_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(codec_folder, tmp_path / "codec")
    tensors = tmp_path / "codec" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    assert_refused(karhunen("inspect", tmp_path / "codec"), "truncated")


def test_an_artifact_of_another_model_is_refused_with_the_reason(
    karhunen: Command, codec_folder: Path, other_model_folder: Path
) -> None:
    done = karhunen("generate", "--codec", codec_folder, "--model", other_model_folder, "-p", "hello")
    assert_refused(done, "llama", "qwen3")


def test_empty_and_short_texts_are_refused(karhunen: Command, model_folder: Path, tmp_path: Path) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text(" \n")
    short.write_text("three words only")
    start = ["calibrate", "--model", model_folder, "-o", tmp_path / "codec", "--text"]
    assert_refused(karhunen(*start, empty), "empty")
    assert_refused(karhunen(*start, short), "short")
    assert_refused(karhunen(*start, tmp_path / "nowhere.txt"), "nowhere.txt")
    assert not (tmp_path / "codec").exists()


def test_a_group_that_does_not_divide_is_refused(
    karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    arguments = ["calibrate", "--model", model_folder, "--text", text_file, "-o", tmp_path / "codec"]
    assert_refused(karhunen(*arguments, "--recipe", "nova_kv:bits=3"), "layer 0", "keys")


def test_a_rotary_frame_on_a_model_without_rope_is_refused(
    karhunen: Command, gpt2_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    done = karhunen("calibrate", "--model", gpt2_folder, "--text", text_file, "-o", tmp_path / "codec")
    assert_refused(done, "RoPE")


def test_statistics_that_lack_what_a_recipe_needs_are_refused(
    karhunen: Command, codec_folder: Path, tmp_path: Path
) -> None:
    saved = codec_folder / "statistics"
    done = karhunen("calibrate", "--statistics", saved, "--recipe", "nova_kv", "-o", tmp_path / "codec")
    assert_refused(done, "layer 0", "queries of the keys", "calibrate again")


def test_a_model_that_is_nowhere_is_refused(karhunen: Command, codec_folder: Path, tmp_path: Path) -> None:
    done = karhunen("generate", "--codec", codec_folder, "--model", "./no/such/folder", "-p", "x")
    assert_refused(done, "no/such/folder", "smollm2")
    assert_refused(karhunen("demo", "--dtype", "int3"), "int3", "bfloat16")


def test_a_prompt_comes_from_one_place_and_is_not_empty(
    karhunen: Command, codec_folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    start = ["generate", "--codec", codec_folder, "--model", model_folder]
    assert_refused(karhunen(*start, "-p", "x", "--prompt-file", "y"), "not both")
    assert_refused(karhunen(*start, "--prompt-file", tmp_path / "none.txt"), "none.txt")
    assert_refused(karhunen("generate", "--codec", tmp_path / "nowhere", "-p", "  "), "the prompt is empty")
    (tmp_path / "blank.txt").write_text("\n")
    assert_refused(karhunen(*start, "--prompt-file", tmp_path / "blank.txt"), "the prompt is empty")
    assert_refused(karhunen(*start, "-p", "x" * 600), "positions")
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG")
    assert_refused(karhunen(*start, "--prompt-file", tmp_path / "picture.txt"), "picture.txt", "UTF-8")


def test_numbers_that_are_none_are_refused_in_our_words(
    karhunen: Command, codec_folder: Path, model_folder: Path
) -> None:
    start = ["generate", "--codec", codec_folder, "--model", model_folder, "-p", "x"]
    assert_refused(karhunen(*start, "--seed", str(2**70)), "seed", "2^63")
    for bits in ("nan", "inf", "-1"):
        assert_refused(karhunen("bench", "--bits", bits), "--bits", f"'{bits}' is not a finite number above 0")


def test_an_option_of_a_recipe_given_twice_is_refused(karhunen: Command, model_folder: Path, tmp_path: Path) -> None:
    done = karhunen(
        "calibrate", "--model", model_folder, "--recipe", "int4:bits=4,group=8,group=16", "-o", tmp_path / "x"
    )
    assert_refused(done, "'group'", "twice")


def test_a_model_given_for_a_codec_is_named_as_one(karhunen: Command, model_folder: Path) -> None:
    assert_refused(karhunen("inspect", model_folder), "karhunen-codec", "another program's")


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    karhunen: Command, model_folder: Path, codec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("the model is not to be loaded")

    for verb in ("calibrate", "fold"):
        monkeypatch.setattr(f"karhunen.cli.{verb}.load_model", load)
    monkeypatch.setattr("karhunen.cli.evaluate.load_model", load)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "index.html").write_text("precious")
    before = {path: path.read_bytes() for folder in (mine, model_folder) for path in folder.iterdir()}
    calibrate = ["calibrate", "--model", model_folder]
    assert_refused(karhunen(*calibrate, "-o", model_folder), "config.json", "choose a new or empty folder")
    assert_refused(karhunen(*calibrate, "-o", mine), str(mine), "index.html")
    assert_refused(karhunen(*calibrate, "-o", mine / "index.html"), "is a file")
    assert_refused(karhunen(*calibrate, "-o", "/proc/nowhere/codec"), "cannot write into /proc/nowhere/codec")
    assert_refused(karhunen(*calibrate, "-o", tmp_path / "c", "--resume", "/proc/nowhere"), "cannot write into /proc")
    assert_refused(karhunen("fold", "--model", model_folder, "--codec", codec_folder, "-o", mine), "is not empty")
    assert_refused(karhunen("leaderboard", "--model", model_folder, "-o", mine), "index.html", "no report")
    (mine / "speed.png").write_text("precious")
    assert_refused(karhunen("bench", "-o", mine), "speed.png", "choose another")
    (mine / "speed.png").unlink()
    assert before == {path: path.read_bytes() for folder in (mine, model_folder) for path in folder.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_while_a_codec_is_written_is_one_line(
    karhunen: Command, codec_folder: Path, model_folder: Path, text_file: Path, small_disk: Path
) -> None:
    """And what was written of it is gone again."""
    measuring = ["--model", model_folder, "--text", text_file, "--max-tokens", 400, "--keep-statistics"]
    for how in (["--statistics", codec_folder / "statistics"], measuring):
        done = karhunen("calibrate", *how, "--recipe", "spectra:group=8", "-o", small_disk / "codec")
        assert done.code == 2
        assert_refused(done, f"cannot write {small_disk / 'codec'}", "No space left on device", "still whole")
        assert not list(small_disk.iterdir())


def test_statistics_stay_where_they_are_when_a_codec_is_fitted_beside_them(
    karhunen: Command, codec_folder: Path, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(codec_folder, tmp_path / "codec")
    saved, before = tmp_path / "codec" / "statistics", (codec_folder / "statistics" / "config.json").read_text()
    done = karhunen("calibrate", "--statistics", saved, "--recipe", "spectra:bits=4,group=8", "-o", tmp_path / "codec")
    assert done.code == 0, done.err
    assert "earlier" not in done.err
    start = ["calibrate", "--model", model_folder, "--text", text_file, "-o", tmp_path / "codec", "--max-tokens", 900]
    done = karhunen(*start, "--recipe", "int4:group=8")
    assert done.code == 0, done.err
    assert f"{saved} are of an earlier calibration, and stay" in done.err
    assert (saved / "config.json").read_text() == before
    done = karhunen(*start, "--recipe", "int4:group=8", "--keep-statistics")
    assert done.code == 0, done.err
    assert (saved / "config.json").read_text() != before
    assert_refused(karhunen("calibrate", "--statistics", saved, "-o", saved), "karhunen-codec")


def test_debug_shows_the_traceback(karhunen: Command, tmp_path: Path) -> None:
    done = karhunen("inspect", tmp_path / "nothing", "--debug")
    assert done.code == 2
    assert "Traceback" in done.err


def test_ctrl_c_leaves_with_130(karhunen: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from karhunen.codec import Codec

    def interrupted(folder: Path) -> Codec:
        raise KeyboardInterrupt

    monkeypatch.setattr(Codec, "from_pretrained", interrupted)
    assert karhunen("inspect", tmp_path) == Finished(130, "", "karhunen: interrupted\n")


def test_a_fault_of_ours_is_one_line_and_exit_code_1(
    karhunen: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from karhunen.codec import Codec

    def broken(folder: Path) -> Codec:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(Codec, "from_pretrained", broken)
    done = karhunen("inspect", tmp_path)
    assert done.code == 1
    assert done.err == "karhunen: unexpected RuntimeError: two lines; run again with --debug for the traceback\n"


def test_a_choice_that_does_not_exist_is_refused_without_the_tests_type_checks(tmp_path: Path) -> None:
    words = ["calibrate", "--recipe", "fp8:number=e3m4", "-o", str(tmp_path / "codec")]
    code = f"import sys; from karhunen.cli import run; sys.exit(run({words!r}))"
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source, check=False)
    assert_refused(Finished(done.returncode, done.stdout, done.stderr), "e3m4", "e4m3")


def test_help_names_every_verb_and_imports_no_torch() -> None:
    code = (
        "import sys; from karhunen.cli import run; code = run(['--help']); "
        "sys.exit(code or int('torch' in sys.modules) * 3)"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source, check=False)
    assert done.returncode == 0, done.stderr
    for verb in ("calibrate", "generate", "inspect", "doctor", "recipes", "demo"):
        assert verb in done.stdout
    assert "..." not in done.stdout.split("Commands:")[1], "no verb's line is cut short"


def test_the_version_is_printed(karhunen: Command) -> None:
    import karhunen as package

    assert karhunen("--version") == Finished(0, f"karhunen {package.__version__}\n", "")


def test_a_json_error_leaves_stdout_empty(karhunen: Command, tmp_path: Path) -> None:
    done = karhunen("calibrate", "--recipe", "none", "-o", tmp_path / "c", "--json")
    assert_refused(done, "unknown recipe")
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.out)
