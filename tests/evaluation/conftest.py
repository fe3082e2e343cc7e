"""A tiny model whose every layer is coded, its tokenizer, its statistics, and documents of random tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import save_tiny

from karhunen import recipes
from karhunen.calibration.calibrate import calibrate
from karhunen.codec import Codec
from karhunen.evaluation.scores.score import DenseRun, Document, run_dense
from karhunen.fitting import fit
from karhunen.hf.embedded import load
from karhunen.statistics.gathered import Statistics
from karhunen.windows.sink_recent import SinkRecent

N_PREFILL, N_SCORED = 160, 48
WINDOW = SinkRecent(sink=4, recent=16)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("evaluated") / "tiny", max_position_embeddings=1024)


@pytest.fixture(scope="session")
def loaded(folder: Path) -> tuple[Any, Any]:
    return load(folder)


@pytest.fixture(scope="session")
def statistics(loaded: tuple[Any, Any]) -> Statistics:
    return calibrate(loaded[0], random_tokens(600, 1)[None], [], max_tokens=600)


def random_tokens(n: int, seed: int) -> torch.Tensor:
    return torch.randint(2, 250, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def dense(loaded: tuple[Any, Any]) -> DenseRun:
    return run_dense(loaded[0], Document("random", random_tokens(N_PREFILL + N_SCORED, 2), N_PREFILL))


def codec_of(text: str, statistics: Statistics) -> Codec:
    """With a window that the documents leave; `full` keeps its own."""
    recipe = recipes.make(text)
    return fit(recipe if recipe.key is None else replace(recipe, window=WINDOW), statistics)
