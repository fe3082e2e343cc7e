"""Mutated files are refused in one line or used: what `benchmarks/fuzz.py` once found, and some more of each kind."""

import json
from itertools import cycle
from pathlib import Path

import pytest
from tests.fuzzing import FOUND, SUBJECTS, TARGETS, run_case

N_CASES = 14


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("target", "subject", "seed"), json.loads(FOUND.read_text()))
def test_what_was_found_once_is_refused_or_used(target: str, subject: str, seed: int, tmp_path: Path) -> None:
    assert run_case(target, subject, seed, tmp_path / "case") in ("refused", "used")


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("target", TARGETS)
def test_mutated_files_are_refused_or_used(target: str, tmp_path: Path) -> None:
    cases = zip(range(N_CASES), cycle(SUBJECTS[target]), strict=False)
    ends = {run_case(target, subject, seed, tmp_path / "case") for seed, subject in cases}
    assert ends == {"refused", "used"}
