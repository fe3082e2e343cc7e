"""`torch.compile(model)` goes on from a compressed cache: the same logits, compiled once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.hf.test_cache import fitted, generate, run, tokens
from tests.hf.tiny import build
from torch import Tensor
from torch._dynamo.utils import counters

from karhunen.hf.attention import enable
from karhunen.hf.cache import CompressedCache
from karhunen.hf.compressed import compressed

N_PROMPT, N_STEPS = 40, 9
LEFT_TO_PYTHON = {"_note_offsets", "update", "karhunen_attention", "enter", "leave", "function"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def steps(model: Any, held: CompressedCache, padding: int = 0) -> tuple[Tensor, list[int]]:
    """Logits of a prompt and some steps, and how many graphs there were after each."""
    seen = torch.ones(2, N_PROMPT + N_STEPS, dtype=torch.int64)
    seen[1, :padding] = 0
    out, graphs = [], []
    for start, stop in [(0, N_PROMPT), *((n, n + 1) for n in range(N_PROMPT, N_PROMPT + N_STEPS))]:
        given = {"attention_mask": seen[:, :stop]} if padding else {}
        out.append(run(model, tokens(2, stop - start, seed=start), held, **given))
        graphs.append(counters["stats"]["unique_graphs"])
    return torch.cat(out, dim=1), graphs


@pytest.mark.parametrize("name", ["karhunen", "kivi", "snapkv"])
@pytest.mark.parametrize("attention", ["karhunen", "sdpa"])
def test_a_compiled_model_gives_the_logits_of_the_plain_one(name: str, attention: str) -> None:
    model = build("llama")
    if attention == "karhunen":
        enable(model)
    made = fitted("llama", name)
    expected, _ = steps(model, CompressedCache(model, made))
    faster = torch.compile(model, backend="eager")
    counters.clear()
    held = CompressedCache(faster, made)
    found, graphs = steps(faster, held)
    assert torch.equal(found, expected)
    assert graphs[0] > 0
    assert graphs[2:] == [graphs[2]] * (len(graphs) - 2), "a step compiles nothing that the one before has compiled"
    ours = [reason for reason in counters["graph_break"] if "torch.compiler.disable" in reason]
    assert {_function(reason) for reason in ours} <= LEFT_TO_PYTHON


def test_padded_rows_in_a_compiled_model() -> None:
    model = build("llama")
    enable(model)
    made = fitted("llama", "karhunen")
    expected, _ = steps(model, CompressedCache(model, made), padding=9)
    faster = torch.compile(model, backend="eager")
    found, graphs = steps(faster, CompressedCache(faster, made), padding=9)
    assert torch.equal(found, expected)
    assert graphs[2:] == [graphs[2]] * (len(graphs) - 2)


def test_a_compiled_model_generates_inside_the_context() -> None:
    model, made = build("llama"), fitted("llama", "karhunen")
    with compressed(model, made) as session:
        expected = generate(model, tokens(1, N_PROMPT))
    model.compile(backend="eager")
    with compressed(model, made) as session:
        assert generate(model, tokens(1, N_PROMPT)) == expected
    assert any(row.n_coded for row in session.report().layers)
    assert counters["stats"]["unique_graphs"] > 0


def _function(reason: str) -> str:
    return reason.split("<function ")[1].split(" at ")[0].split(".")[-1]
