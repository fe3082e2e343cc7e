"""What a new user may type wrong: each is answered by one line, with exit code 2, before anything is loaded."""

from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.cli.test_usage import assert_refused

CALIBRATE, GENERATE = "calibrate -o new", "generate --codec codec -p x"
CASES: dict[str, str] = {
    f"{GENERATE} --max-new-tokens 0": "greater than or equal to 1",
    f"{GENERATE} --top-k -1": "greater than or equal to 0",
    f"{GENERATE} --attention flash": "known: karhunen, sdpa, eager",
    f"{GENERATE} --device cuda:7": "there is no cuda:7 here",
    f"{GENERATE} --device gpu": "names no device",
    f"{CALIBRATE} --dtype fp16": "known: float32, bfloat16, float16",
    f"{CALIBRATE} --model notes.txt": "is not a folder",
    "generate --codec notes.txt -p x": "no artifact at notes.txt",
    f"{CALIBRATE} --max-tokens 1e3": "valid integer",
    f"{CALIBRATE} --max-tokens -4": "greater than or equal to 1",
    f"{CALIBRATE} --recipe :bits=2": "unknown recipe ''",
    f"{CALIBRATE} --recipe karhunen:bits=abc": "not of type float",
    f"{CALIBRATE} --recipe karhunen:bits=0": "more than 0",
    f"{CALIBRATE} --recipe karhunen:bits=100": "at most 16",
    f"{CALIBRATE} --recipe karhunen:bits=nan": "not of type float",
    f"{CALIBRATE} --recipe karhunen:bits==2": "not of type float",
    f"{CALIBRATE} --recipe karhunen:bits=2;x=1": "not of type float",
    f"{CALIBRATE} --recipe karhunen:joined=maybe": "not of type bool",
    f"{CALIBRATE} --recipe karhunen:tables=round": "known: free, overlapping, additive",
    f"{CALIBRATE} --recipe karhunen:block_tokens=0": "not a block",
    f"{CALIBRATE} --recipe karhunen:block_tokens=1000000000": "use 16384 at most",
    f"{CALIBRATE} --recipe KARHUNEN": "did you mean karhunen",
    f"{CALIBRATE} --recipe int4,int8": "did you mean int8 or int4",
    f"{CALIBRATE} --recipe int4:group=0": "use 1 or more",
    f"{CALIBRATE} --recipe int4:recent=-5": "use 0 or more",
    f"{CALIBRATE} --recipe int4:recent=1.5": "not of type int",
    f"{CALIBRATE} --recipe kivi:bits=99": "use 1 to 16",
    f"{CALIBRATE} --recipe nova_kv:clip=0": "0.5 < clip <= 1",
    f"{CALIBRATE} --recipe nova_kv:value_axes=up": "known: outputs, received, scores",
    f"{CALIBRATE} --recipe snapkv:kept=0": "use kept=32 or more",
    f"{CALIBRATE} --recipe snapkv:kept=10,recent=32": "use kept=32 or more",
    f"{CALIBRATE} --recipe kvtc:page=0": "not a page",
    f"{CALIBRATE} --memory 5XB": "no size of memory",
    f"{CALIBRATE} --memory -3GB": "no size of memory",
    f"{CALIBRATE} --sequence-tokens 10": "greater than or equal to 64",
    f"{CALIBRATE} --batch 0": "greater than or equal to 1",
    f"{CALIBRATE} --device tpu": "names no device",
    f"{CALIBRATE} --statistics none": "no artifact at none",
    "inspect notes.txt": "no artifact at notes.txt",
    "inspect codec extra": "unexpected extra argument",
    "bench --shape 3x3": "is not HxQxD",
    "bench --shape 3x3x63": "not a multiple of 8",
    "bench --tables blue": "known: free, overlapping, additive",
    "plan nosuchmodel": "neither a model of the table",
    "plan smollm2 --memory ten": "no size of memory",
    "plan smollm2 --reserve 200%": "not a share of the memory",
    "plan smollm2 --plot a.docx": "no kind of picture",
    "plan smollm2 --ratio 0": "not a finite number above 0",
    "evaluate --task texts:nonsense": "known: development, test",
    "evaluate --task texts@0,0": "has no document",
    "evaluate --window -1,5": "neither two counts",
    "evaluate --results notes.txt": "cannot write into notes.txt",
    "compare a a --results empty": "holds no results",
    "report notes.txt -o page": "is not JSON",
    "prefix ls ftp://x/y": "unexpected extra argument",
    "prefix rm": "which pages?",
    "demo --recipe nope": "unknown recipe 'nope'",
    "--nothing": "No such option",
}


@pytest.mark.parametrize("line", CASES)
def test_a_wrong_line_is_answered_by_one(
    line: str, karhunen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("Buy milk.")
    Path("empty").mkdir()
    monkeypatch.setattr("karhunen.hf.embedded.load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert_refused(karhunen(*line.split(" ")), CASES[line])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.txt"]


def test_a_codec_given_for_a_model_is_named_as_one(karhunen: Command, codec_folder: Path, model_folder: Path) -> None:
    given = ["--codec", codec_folder, "--model", codec_folder, "-p", "x"]
    assert_refused(karhunen("generate", *given), "holds a karhunen-codec, not a model")
    assert_refused(karhunen("generate", "--codec", model_folder, "--model", model_folder, "-p", "x"), "another program")
