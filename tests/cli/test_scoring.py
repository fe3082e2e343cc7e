"""The verbs that measure, on a tiny model: files, table, page, comparison."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command, Finished

from karhunen.evaluation.runner import Outcome

SIZES = ["--prefill-tokens", 96, "--scored-tokens", 32, "--generated-tokens", 4]


def evaluated(karhunen: Command, model: Path, text: Path, results: Path, *more: object) -> Finished:
    recipes = ["--recipe", "full", "--recipe", "int8:group=12,recent=16", "--recipe", "int2:group=12,recent=16"]
    start = ["evaluate", "--model", model, "--task", text, "--limit", 1, "--results", results]
    return karhunen(*start, *SIZES, *recipes, *more)


def test_evaluate_report_and_compare(karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    done = evaluated(karhunen, model_folder, text_file, tmp_path / "r", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    rows = {row["recipe"]: row for row in said["rows"]}
    assert (rows["full"]["kl"], rows["full"]["top1"], rows["full"]["ratio_to_16_bits"]) == (0, 1, 1)
    assert 0 < rows["int8"]["kl"] < rows["int2"]["kl"]
    assert all(Path(path).is_file() for path in said["made"])

    again = evaluated(karhunen, model_folder, text_file, tmp_path / "r")
    assert again.code == 0, again.err
    assert "0 results made, 3 were there already" in again.out

    page = karhunen("report", tmp_path / "r", "-o", tmp_path / "page")
    assert page.code == 0, page.err
    assert (tmp_path / "page" / "index.html").is_file()

    compared = json.loads(karhunen("compare", "int8", "int2", "--results", tmp_path / "r", "--json").out)
    winners = {row["measure"]: row["winner"] for row in compared["differences"]}
    assert winners["kl"] == "A"


def test_what_cannot_be_evaluated_is_refused_in_one_line(karhunen: Command, model_folder: Path, tmp_path: Path) -> None:
    start = ["evaluate", "--model", model_folder, "--results", tmp_path / "r"]
    for arguments, word in (
        (["--recipe", "nothing"], "unknown recipe"),
        (["--task", "nothing"], "unknown task"),
        (["--window", "few"], "4,128"),
        (["--prefill", "none"], "chunked"),
        (["--dtype", "int3"], "bfloat16"),
    ):
        done = karhunen(*start, *arguments)
        assert (done.code, done.out) == (2, "")
        assert word in done.err
    assert karhunen("report", tmp_path / "none").code == 2
    assert karhunen("compare", "a", "b", "--results", tmp_path / "none").code == 2
    assert not (tmp_path / "r").exists()


def test_with_several_jobs_only_they_read_the_weights(
    karhunen: Command, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that starts them looks at the configuration alone, wherever the model is to lie."""
    given: list[Any] = []

    def plan(_: Any, load: Any, **settings: Any) -> Outcome:
        given.append((load, settings["jobs"]))
        return Outcome()

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("karhunen.evaluation.runner.evaluate", plan)
    start = ["evaluate", "--model", model_folder, "--results", tmp_path / "r", "--jobs", 2]
    with monkeypatch.context() as blocked:
        blocked.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
        karhunen(*start, "--recipe", "int4", "--recipe", "int8")
    [(load, jobs)] = given
    assert jobs == 2
    model, tokenizer = load()
    assert model.config.model_type == "llama"
    assert len(tokenizer) == model.config.vocab_size


def test_when_every_recipe_is_refused_the_exit_code_is_2(
    karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    start = ["evaluate", "--model", model_folder, "--task", text_file, "--results", tmp_path / "r", *SIZES]
    done = karhunen(*start, "--limit", 1, "--recipe", "quarot:bits=2,group=0")
    assert done.code == 2
    done = karhunen(*start, "--limit", 1, "--recipe", "spectra:bits=0.1,sink=0")
    assert done.code == 2
    assert "not measured: spectra:bits=0.1,sink=0" in done.err


def test_a_full_leaderboard_has_the_tasks_and_goes_on_where_it_was_killed(
    karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from karhunen.cli.evaluate import leaderboard_tasks
    from karhunen.evaluation import tasks
    from karhunen.evaluation.tasks.kinds import Kind

    assert leaderboard_tasks(full=False) == ("texts",)
    named = [task for text in leaderboard_tasks(full=True) for task in tasks.make_tasks(text)]
    assert {"documents 1000", "passkeys 1000", "calls 1000", "ruler niah_single_1 1500"} <= {t.name for t in named}

    monkeypatch.setattr("karhunen.cli.evaluate.leaderboard_tasks", lambda full: (str(text_file), "sums@60")[: 1 + full])
    start = ["leaderboard", "--model", model_folder, "--results", tmp_path / "r", "--limit", 1, *SIZES, "--json"]
    start += ["--recipe", "full", "--recipe", "int8:group=12,recent=16"]
    reported: list[Any] = []
    monkeypatch.setattr("karhunen.cli.report.write", lambda *about, **_: reported.append(about))

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kind, "prepare", killed)
        assert karhunen(*start, "--full").code != 0
    done = karhunen(*start, "--full")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (len(said["made"]), len(said["kept"])) == (2, 2)
    scores = {(row["task"], row["recipe"]): row for row in said["rows"]}
    assert scores["sums 60", "full"]["score"] == scores["sums 60", "full"]["dense_score"]
    assert len(reported) == 1
