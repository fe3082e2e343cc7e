"""The page of answers says what was measured: losses first, a mark where the dense model is better beyond chance."""

from typing import Any

import pytest
from benchmarks.task_tables import answers, between, columns, equal_tails, figure_of, lost, tails, unchanged


def cell(task: str, recipe: str, rate: int, right: str, **more: Any) -> dict[str, Any]:
    score = right.count("1") / len(right)
    return {
        "task": task, "recipe": recipe, "rate": rate, "right": right, "score": score, "n_questions": len(right),
        "same": score, "similarity": score, **more,
    }  # fmt: skip


def dense(right: str) -> dict[str, Any]:
    return {"right": right, "score": right.count("1") / len(right), "commit": "abc", "n_texts": 1}


FOUND: dict[str, Any] = {
    "dense": {"chat 1000": dense("1" * 20), "code 1000": dense("0" * 20), "sums 1000": dense("10" * 10),
              "passkeys 1000": dense("1" * 4)},
    "cells": [
        cell("chat 1000", "karhunen", 8, "1" * 10 + "0" * 10), cell("chat 1000", "spectra", 8, "1" * 18 + "0" * 2),
        cell("chat 1000", "karhunen", 4, "1" * 20), cell("code 1000", "karhunen", 8, "1" * 15 + "0" * 5),
        cell("passkeys 1000", "karhunen", 8, "1101", depths=[0.1, 0.4, 0.6, 0.9]),
    ],
}  # fmt: skip


def test_a_task_that_the_dense_model_fails_is_left_out() -> None:
    assert columns(FOUND) == {"chat": ["chat 1000"], "code": ["code 1000"], "passkeys": ["passkeys 1000"]}


def test_losses_are_named_with_their_chance() -> None:
    said = lost(FOUND)
    assert "**chat at 8 times**: 10 of 20 right, the dense model 20 (beyond chance, p = 0.002)" in said
    assert "`spectra` at 8 18 (beyond chance, p = 0.0078)" in said
    assert "**passkeys at 8 times**: 3 of 4 right, the dense model 4 (within chance, p = 1)" in said
    assert "at 4 times" not in said


def test_cells_have_intervals_and_marks() -> None:
    rows = {tuple(row.split(" | ")[:2]): row for row in answers(FOUND).splitlines()[2:]}
    assert "50 (30–70) ↓" in rows["| `karhunen`", "8"]
    assert "100 (84–100) |" in rows["| `karhunen`", "4"] and "– |" in rows["| `karhunen`", "4"]
    assert "75 (53–89)" in unchanged(FOUND)


def test_a_table_takes_the_place_of_the_one_before() -> None:
    page = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert between(page, "x", "new") == "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb\n"
    with pytest.raises(ValueError, match="no place for the table 'y'"):
        between(page, "y", "new")


def test_rows_of_both_windows_stand_side_by_side() -> None:
    row = {
        "tokens": 1024, "recipe": "int4", "coded_bits_per_element": 4.5, "kl": 0.01, "kl_low": 0.005, "kl_high": 0.02,
        "kl_p99": 0.1, "kl_p999": 0.5, "worst": 1.25, "top1": 0.95, "perplexity": 9.0, "perplexity_dense": 8.9,
        "leaves_at": [3, None], "commit": "abc",
    }  # fmt: skip
    rows = [{**row, "window": "4 + 128"}, {**row, "window": "none", "kl": 0.3, "top1": 0.5}]
    assert "| `int4` | 4.50 | 3.6 | 0.0100 | 0.300 | 95.0 | 50.0 | `abc` |" in equal_tails(rows)
    assert "3, –" in tails(rows) and len(tails(rows).splitlines()) == 3


def test_the_picture_has_a_panel_for_each_kind() -> None:
    titles = [axes.get_title() for axes in figure_of(FOUND).axes]
    assert titles == ["chat", "code, as dense", "passkeys", "karhunen 8×"]
