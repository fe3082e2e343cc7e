"""Files of results are read where they hold what a result holds, and results that differ are told apart."""

import copy
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.evaluation.test_report import made_up

from karhunen.allocation.water_filling import one_budget
from karhunen.evaluation.results.compare import compare, select
from karhunen.evaluation.results.report import page
from karhunen.evaluation.results.result import Result, fingerprint_of, read_result, read_results, write_result
from karhunen.evaluation.results.rows import rows_of
from karhunen.recipes import make


def written(folder: Path, recipe: str, bits: float, kl: float, **configuration: Any) -> Path:
    result = made_up(recipe, bits, kl)
    given = {**result.pop("configuration"), **configuration}
    result.pop("fingerprint")
    return write_result(folder, given, result)


def test_a_whole_result_is_read(tmp_path: Path) -> None:
    assert read_result(written(tmp_path, "spectra", 2.0, 0.1))["configuration"]["recipe"] == "spectra"


def leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data[:3]) if isinstance(data, list) else ()
    return [path, *(leaf for key, value in pairs for leaf in leaves(value, (*path, key)))]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_result_is_refused_with_its_name_or_makes_a_row(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    file = written(tmp_path, "spectra", 2.0, 0.1)
    whole, n_refused = json.loads(file.read_text()), 0
    for _ in range(100):
        damaged = copy.deepcopy(whole)
        path = random.choice(leaves(damaged)[1:])
        at = damaged
        for key in path[:-1]:
            at = at[key]
        if random.random() < 0.4:
            del at[path[-1]]
        else:
            at[path[-1]] = random.choice([None, -1, 0, 10**9, "x", [], {}, True, float("nan")])
        if isinstance(configuration := damaged.get("configuration"), dict) and "fingerprint" in damaged:
            damaged["fingerprint"] = fingerprint_of(configuration)
        file.write_text(json.dumps(damaged))
        try:
            result = read_result(file)
        except ValueError as error:
            assert str(file) in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            n_refused += 1
            continue
        rows_of([result])
        with suppress(ValueError):  # other inputs, or other numbers of tokens
            compare([result], [made_up("int4", 4.0, 0.2)])
        page([result], [])
    assert n_refused > 40


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": NaN}', "[]", "3"])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "spectra@8-0123456789ab.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"spectra@8-0123456789ab\.json is "):
        read_result(file)


def test_a_configuration_changed_by_hand_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "spectra", 2.0, 0.1)
    file.write_text(file.read_text().replace('"recipe": "spectra"', '"recipe": "karhunen"'))
    with pytest.raises(ValueError, match="is damaged: its configuration is not the one that its fingerprint names"):
        read_result(file)


SHORT, LONG = ["4096 tokens, sha256 0123456789"], ["16384 tokens, sha256 abcdef0123"]


def test_results_that_differ_in_their_calibration_alone_are_two_rows(tmp_path: Path) -> None:
    for calibration, kl in ((SHORT, 0.2), (LONG, 0.1)):
        written(tmp_path, "spectra", 2.0, kl, calibration=calibration)
    written(tmp_path, "kivi", 2.0, 0.3, calibration=LONG)
    results = read_results(tmp_path)
    assert sorted(row.text for row in rows_of(results)) == [
        "kivi:bits=2.0",
        "spectra:bits=2.0 [16384 tokens, abcdef]",
        "spectra:bits=2.0 [4096 tokens, 012345]",
    ]
    with pytest.raises(ValueError, match=r"there are kivi:bits=2\.0, spectra:bits=2\.0 \[16384 tokens, abcdef\], "):
        select(results, "spectra:bits=2.0")


@pytest.mark.parametrize("calibration", [SHORT, LONG])
def test_compare_pairs_results_of_one_calibration(calibration: list[str], tmp_path: Path) -> None:
    for kind, kl in ((SHORT, 0.2), (LONG, 0.1)):
        written(tmp_path, "spectra", 2.0, kl, calibration=kind)
    mine: Result = made_up("kivi", 2.0, 0.3)
    mine["configuration"]["calibration"] = calibration
    found = next(d for d in compare([mine], read_results(tmp_path)) if d.measure == "kl")
    assert found.b_mean == pytest.approx(0.2 if calibration == SHORT else 0.1)


def test_a_page_says_nothing_of_its_own_accord() -> None:
    result = made_up("spectra", 2.0, 0.1)
    result["made"] |= {"n_threads": "<script>", "date": "<b>"}
    assert "<script>," not in page([result], [])
    assert "<b>" not in page([result], [])


@pytest.mark.parametrize("text", ["ratio=8,bits=4", "ratio=8,token_bytes=40", "bits=4,token_bytes=40"])
def test_a_budget_is_said_once(text: str) -> None:
    with pytest.raises(ValueError, match="each say the budget; give one of them"):
        make(f"karhunen:{text}")
    assert one_budget(2.0, 2.0, 8, None) == 2.0
    assert one_budget(4.0, 2.0, None, None) == 4.0


def test_a_point_without_error_is_named_where_a_logarithmic_axis_has_no_place_for_it() -> None:
    plots = pytest.importorskip("karhunen.evaluation.results.plots")
    figure = plots.rate_distortion([made_up("spectra", 2.0, 0.1), made_up("int8", 8.0, 0.0)])
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert said == ["no error: int8:bits=8.0"]
