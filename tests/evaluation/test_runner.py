"""Results as files: made once, kept, whole or not there at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from karhunen.evaluation import runner
from karhunen.evaluation.results.rates import at, rated, settings
from karhunen.evaluation.results.result import Result, path_of, read_result, read_results, write_result
from karhunen.evaluation.results.rows import row_of
from karhunen.evaluation.runner import Plan, evaluate
from karhunen.evaluation.tasks.texts import PreparedTexts, Texts
from karhunen.recipes import names

TEXTS = Texts(n_prose=1, n_code=1, n_literature=0, prefill_tokens=200, scored_tokens=48, generated_tokens=8)
QUICK = Texts(n_prose=0, n_code=1, n_literature=0, prefill_tokens=64, scored_tokens=16, generated_tokens=0)
CHOSEN = tuple(rated(["full", "int8:group=12,recent=16", "kivi:recent=16"]))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan("tiny", "float32", (QUICK,), CHOSEN, tmp_path / "results", tmp_path / "statistics")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, loaded: tuple[Any, Any]) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("results")
    plan = Plan("tiny", "float32", (TEXTS,), CHOSEN, folder / "results", folder / "statistics")
    evaluate(plan, lambda: loaded)
    return {result["configuration"]["recipe"]: result for result in read_results(plan.results)}


def test_what_exists_is_not_run_again(plan: Plan, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate(plan, lambda: loaded)
    assert len(first.made) == 3
    assert not first.refused
    before = {path: path.read_bytes() for path in first.made}
    monkeypatch.setattr(PreparedTexts, "measure", lambda *_: pytest.fail("measured again"))
    second = evaluate(plan, lambda: loaded)
    assert (second.made, sorted(second.kept)) == ([], sorted(first.made))
    assert {path: path.read_bytes() for path in second.kept} == before


def test_a_killed_run_goes_on_where_it_was(
    plan: Plan, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    plain = PreparedTexts.measure

    def killed_at_the_third(self: PreparedTexts, codec: Any) -> dict[str, Any]:
        measured.append(codec.origin.recipe)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return plain(self, codec)

    monkeypatch.setattr(PreparedTexts, "measure", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        evaluate(plan, lambda: loaded)
    assert len(read_results(plan.results)) == 2
    assert not list(plan.results.rglob("*.part"))
    outcome = evaluate(plan, lambda: loaded)
    assert (len(outcome.kept), len(outcome.made)) == (2, 1)
    assert measured == ["full", "int8", "kivi", "kivi"]


def test_a_process_killed_while_writing_leaves_no_half_a_result(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = {"model": "m", "task": {"name": "t"}, "recipe": "r", "rate": 4}

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_result(tmp_path, configuration, {"made": {}})
    assert not list(path_of(tmp_path, configuration).parent.iterdir())


def test_another_seed_document_or_option_is_another_result(plan: Plan, loaded: tuple[Any, Any]) -> None:
    one = replace(plan, rated=plan.rated[:1])
    plans = [
        one,
        replace(one, seed=1),
        replace(one, tasks=(replace(QUICK, n_code=2),)),
        replace(one, tasks=(replace(QUICK, prefill="chunked"),)),
        replace(one, dtype="bfloat16"),
    ]
    paths = {path for each in plans for path in evaluate(each, lambda: loaded).made}
    assert len(paths) == len(plans)


def test_a_result_says_where_it_comes_from_and_what_the_full_cache_scores(results: dict[str, Result]) -> None:
    rows = {name: row_of(result) for name, result in results.items()}
    assert (rows["full"].kl, rows["full"].top1, rows["full"].ratio_to_16_bits) == (0.0, 1.0, 1.0)
    assert rows["kivi"].kl > rows["int8"].kl > 0
    assert rows["int8"].bits_per_element == pytest.approx(8 + 32 / 12)
    result = results["int8"]
    assert result["made"]["versions"]["torch"]
    assert result["made"]["machine"]
    assert result["continuation"]["n_tokens"] >= 1
    assert len(result["tokens"]) == 2


def test_full_continues_as_dense_does_and_every_layer_has_an_error(results: dict[str, Result]) -> None:
    said = results["full"]["continuation"]
    assert said["until_divergence"] == said["n_tokens"]
    assert said["rouge_l"] == 1
    assert results["full"]["layers"] == []
    fine, coarse = results["int8"]["layers"], results["kivi"]["layers"]
    assert [row["layer"] for row in fine] == [0, 1]
    for key in ("attention_kl", "output_error"):
        assert all(0 < a[key] < b[key] for a, b in zip(fine, coarse, strict=True))


def test_a_recipe_that_does_not_fit_is_refused_by_name_and_the_others_go_on(
    plan: Plan, loaded: tuple[Any, Any]
) -> None:
    wanted = replace(plan, rated=tuple(rated(["spectra:bits=0.1", "full"])), calibration_tokens=600)
    outcome = evaluate(wanted, lambda: loaded)
    assert list(outcome.refused) == ["spectra:bits=0.1"]
    assert "budget" in outcome.refused["spectra:bits=0.1"]
    assert len(outcome.made) == 1


def test_statistics_are_measured_once_for_all(
    plan: Plan, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[set[Any]] = []
    plain = runner.calibrate
    monkeypatch.setattr(runner, "calibrate", lambda *args, **kw: (calls.append(set(args[2])), plain(*args, **kw))[1])
    wanted = replace(plan, rated=tuple(rated(["spectra:bits=3,group=8,recent=16"])), calibration_tokens=600)
    evaluate(wanted, lambda: loaded)
    evaluate(replace(wanted, seed=3), lambda: loaded)
    assert len(calls) == 1
    more = tuple(rated(["spectra:bits=3,group=8,recent=16,sink=8"]))
    evaluate(replace(wanted, rated=more), lambda: loaded)
    assert len(calls) == 2, "what is lacking is measured"
    assert calls[1] and not calls[0] & calls[1], "and nothing else"
    assert len(evaluate(wanted, lambda: loaded).kept) == 1, "with what was there"


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x@4-0123456789ab.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="x@4"):
        read_result(file)
    file.write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="evaluate again"):
        read_results(tmp_path)


@pytest.mark.parametrize("name", names())
def test_every_recipe_can_be_made_at_the_rates_that_it_lists(name: str) -> None:
    own = sorted(settings(name))
    found = rated([name], own or (4, 8, 12), (4, 128))
    assert [each.rate for each in found] == (own or [None])
    assert all(each.recipe.name == name for each in found)


def test_a_name_stands_for_all_its_rates_at_one_window() -> None:
    texts = [each.text for each in rated(["kivi", "quarot", "int4", "spectra:bits=3"], (4, 8, 12), (4, 64))]
    assert texts[-1] == "spectra:bits=3"
    assert sum(text.startswith("quarot") for text in texts) == 3
    assert sum(text.startswith("kivi") for text in texts) == 2, "12× is nearest to its 8×"
    assert sum(text.startswith("int4") for text in texts) == 1, "one rate, once"
    window = at("nova_kv", 8, (4, 64)).recipe.window
    assert (window.sink_tokens, window.recent) == (4, 64)  # type: ignore[attr-defined]
