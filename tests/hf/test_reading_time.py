"""What reading takes is measured without what a first call does besides."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import save_tiny
from tests.hf.test_cache import codec_of
from tests.hf.tiny import build

from karhunen.hf import reading_time
from karhunen.hf.reading_time import reading_seconds

FIRST_SECONDS, TOKEN_SECONDS = 100.0, 0.01


class Clock:
    """Advanced by the model: a first call of each length costs much, each token little."""

    def __init__(self) -> None:
        self.now, self.seen, self.n_read = 0.0, set[int](), 0

    def __call__(self) -> float:
        return self.now

    def on_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        n = kwargs["input_ids"].shape[1]
        self.now += TOKEN_SECONDS * n + (0 if n in self.seen else FIRST_SECONDS)
        self.n_read += n
        self.seen.add(n)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reading_time, "perf_counter", made)
    return made


@pytest.fixture
def model(clock: Clock) -> Any:
    made = build("llama")
    made.register_forward_pre_hook(clock.on_forward, with_kwargs=True)
    return made


@pytest.mark.parametrize("n", [1, 16, 17, 400])
def test_first_calls_are_not_counted(model: Any, n: int) -> None:
    assert reading_seconds(model, torch.ones(1, n, dtype=torch.long)) == pytest.approx(TOKEN_SECONDS * n)


def test_measuring_is_short_however_long_the_text(model: Any, clock: Clock) -> None:
    assert reading_seconds(model, torch.ones(1, 500, dtype=torch.long), budget=1.0) == pytest.approx(5.0)
    assert clock.n_read == 2 * 16 + 2 * 50
    assert reading_seconds(model, torch.ones(1, 0, dtype=torch.long)) == 0


def test_a_conversation_saves_what_reading_takes_not_what_its_turns_took(clock: Clock, tmp_path: Path) -> None:
    from karhunen.hf.conversation import converse
    from karhunen.hf.embedded import load

    model, tokenizer = load(save_tiny(tmp_path / "m"))
    model.register_forward_pre_hook(clock.on_forward, with_kwargs=True)
    for turn in range(3):
        clock.seen.clear()
        codec, folder = codec_of(model, "int4"), tmp_path / "talk"
        _, resumed = converse(model, tokenizer, "a long document", codec, folder, chat=False, max_new_tokens=3)
        assert (resumed.n_tokens > 0) == (turn > 0)
        assert resumed.reading_seconds == pytest.approx(TOKEN_SECONDS * resumed.n_tokens)
        assert resumed.seconds_saved <= resumed.reading_seconds
