"""Structured answers: prompts that hold the records, and what counts as a changed call."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.cli.conftest import save_tiny
from tests.hf.test_cache import codec_of

from karhunen.evaluation import verify
from karhunen.evaluation.tasks import tool_calls
from karhunen.evaluation.tasks.tool_calls import BEGINNING, SURE, ToolCalls
from karhunen.evaluation.verify import Limits, Size
from karhunen.hf.embedded import load


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(save_tiny(tmp_path_factory.mktemp("m") / "m", max_position_embeddings=4096))


def test_prompts_end_within_a_call_and_hold_the_records(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    asked = ToolCalls(n_requests=3, n_tokens=2500, n_each=2)
    prepared = asked.prepare(model, tokenizer, 0, None)
    assert [len(requests) for requests in prepared.requests] == [2, 1]
    texts = [tokenizer.decode(tokens) for tokens in prepared.texts]
    assert texts[0] != texts[1]
    for text, tokens, requests in zip(texts, prepared.texts, prepared.requests, strict=True):
        assert text.count('"tool": "book"') == 4
        assert text.index('"confirm": true') < 2000
        for request, wanted, call in requests:
            said = tokenizer.decode(request)
            where = f"{call['id']} in {call['city']} for {call['seats']} people."
            assert said == f"Request: book number {where}\n{BEGINNING}"
            assert 2200 < len(tokens) + len(request) <= 2500
            assert tokenizer.decode(wanted).startswith(f' {{"tool": "book", "id": {call["id"]}')
    assert asked.prepare(model, tokenizer, 0, None).inputs == prepared.inputs
    assert asked.prepare(model, tokenizer, 1, None).inputs != prepared.inputs
    with pytest.raises(ValueError, match="do not fit the model's 4096 positions"):
        replace(asked, n_tokens=4096).prepare(model, tokenizer, 0, None)


def test_a_call_changes_where_a_token_does_and_only_sure_ones_count(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leads are made up: right and sure, right and close, right and changed, sure and changed, wrong."""
    model, tokenizer = tiny
    made = iter(
        [(2.0, 1.0), (SURE / 2, 0.1), (SURE / 2, -0.1), (SURE, -0.1), (-1.0, -1.0)]
    )  # least lead of the dense model, of the coded one

    def leads(_: Any, cache: Any, before: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal pair
        pair = next(made) if len(pair) != 1 else pair
        least, pair = pair[0], pair[1:]
        found = torch.full((len(tokens),), 5.0)
        found[3] = least
        return found, tokens.where(found > 0, tokens + 1)

    pair: tuple[float, ...] = ()
    monkeypatch.setattr(tool_calls, "leads", leads)
    told: list[tuple[int, int]] = []
    prepared = ToolCalls(n_requests=5, n_tokens=900, n_each=2).prepare(model, tokenizer, 0, None)
    body = prepared.measure(codec_of(model, "int4"), lambda *at: told.append(at))
    assert told == [(i, 5) for i in range(6)]
    assert [(call["dense_right"], call["coded_right"]) for call in body["calls"]] == [
        (True, True), (True, True), (True, False), (True, False), (False, False),
    ]  # fmt: skip
    assert len(body["calls"][0]["coded"]) > 30
    assert body["calls"][2]["coded"] == '{"u', "up to the first other token"
    metrics = body["metrics"]
    assert (metrics["n_requests"], metrics["n_right"], metrics["n_sure"]) == (5, 4, 2)
    assert (metrics["same"], metrics["sure_same"], metrics["dense_right"]) == (0.5, 0.5, 0.8)


@pytest.mark.parametrize(
    ("metrics", "status", "words"),
    [
        (
            {"n_right": 12, "n_sure": 10, "same": 9 / 12, "sure_same": 0.9},
            "passed",
            "9 of 10; of 2 close ones 0",
        ),
        ({"n_right": 10, "n_sure": 10, "same": 0.8, "sure_same": 0.8}, "failed", "failed: 8 of 10"),
        ({"n_right": 9, "n_sure": 7, "same": 1.0, "sure_same": 1.0}, "inconclusive", "gets 9 right and is sure of 7"),
    ],
)
def test_the_gate_is_of_sure_calls_and_tells_of_close_ones(
    metrics: dict[str, float], status: str, words: str, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny

    class Found:
        def measure(self, *_: Any) -> dict[str, Any]:
            return {"metrics": {"n_requests": 16, "dense_right": metrics["n_right"] / 16, **metrics}}

    monkeypatch.setattr(ToolCalls, "prepare", lambda *_: Found())
    given = model, tokenizer, codec_of(model, "int4"), Limits(), Size(), 0, lambda *_: None
    gate = verify._call_gate(*given)
    assert gate.status == status
    assert gate.said.endswith(words)
