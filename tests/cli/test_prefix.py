"""`karhunen prefix` and `karhunen serve` on a command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from karhunen.cli import run
from karhunen.stores import DirectoryStore


def test_a_store_is_listed_and_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DirectoryStore(tmp_path).put("torn", b"no page")
    assert run(["prefix", "ls", "--store", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"holdings": [], "damaged": 1, "n_bytes": 7}
    assert run(["prefix", "rm", "--damaged", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "removed 1 pages, 7 bytes\n"
    assert run(["prefix", "ls", "--store", str(tmp_path)]) == 0
    assert "0 damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prefix", "rm", "--store", "STORE"], "which pages?"),
        (["prefix", "ls", "--store", "STORE/file"], "not a folder"),
        (["serve", "model", "--codec", "STORE", "--store", "STORE", "--kv-transfer-config", "{}"], "leave it out"),
        (["serve", "model", "--codec", "STORE", "--role", "all"], "config.json"),
    ],
)
def test_usage_errors_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    assert run([word.replace("STORE", str(tmp_path)) for word in words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_what_an_engines_processes_print_is_not_in_the_answer() -> None:
    script = """
import subprocess
from karhunen.cli.prefix import _children_on_stderr
with _children_on_stderr():
    subprocess.run(["echo", "log"], check=True)
print("answer")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("answer\n", "log\n")
