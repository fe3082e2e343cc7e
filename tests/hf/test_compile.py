"""`torch.compile(model)` goes on from a compressed cache: the same logits, compiled once."""

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.test_cache import codec_of, fitted, generate, run, tokens
from tests.hf.tiny import build
from torch import Tensor
from torch._dynamo.utils import counters

from karhunen.attention import fused
from karhunen.codec import Codec
from karhunen.hf.attention import enable
from karhunen.hf.byte_reads import attention_to
from karhunen.hf.cache import CompressedCache
from karhunen.hf.compressed import compressed
from karhunen.hf.in_graph import hands_over, register_operators

N_PROMPT, N_STEPS = 40, 6
FUSED = 1e-4
"""Of the largest logit: a compiler adds up in an order of its own."""
BEFORE_THE_FORWARD = {"_note_offsets"}
READS_QUERIES = {"_in_python", "_shown_attention", "enter", "leave"}
"""Left to Python too where a window looks at queries."""


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


@cache
def one_layer(name: str) -> Codec:
    return codec_of(build("llama", num_hidden_layers=1), name)


@pytest.mark.parametrize(
    ("name", "padding"),
    [("karhunen", 9), ("kivi", 0), ("snapkv", 0), pytest.param("karhunen", 0, marks=pytest.mark.long)],
)
def test_a_compiled_model_gives_the_logits_of_the_plain_one(name: str, padding: int) -> None:
    model = build("llama", num_hidden_layers=1)
    enable(model)
    made = one_layer(name)
    expected, _ = steps(model, CompressedCache(model, made), padding)
    faster = torch.compile(model, backend="eager")
    counters.clear()
    held = CompressedCache(faster, made)
    found, graphs = steps(faster, held, padding)
    assert torch.equal(found, expected)
    assert held.in_graph == (name != "snapkv")
    assert graphs[0] > 0
    first = 2 if name == "karhunen" else 3  # decoded keys grow: torch compiles for their size anew, once
    assert graphs[first:] == [graphs[first]] * (len(graphs) - first), "a step compiles nothing that was compiled before"
    ours = [reason for reason in counters["graph_break"] if "torch.compiler.disable" in reason]
    assert {_function(reason) for reason in ours} <= BEFORE_THE_FORWARD | (READS_QUERIES if name == "snapkv" else set())


COUNTED = """
import torch
from tests.closeness import LAYERS, assert_near
from tests.hf.test_cache import fitted, run, tokens
from tests.hf.tiny import build
from torch._dynamo.utils import counters

from karhunen.hf.attention import enable
from karhunen.hf.cache import CompressedCache

torch.set_num_threads(1)
model, made, graphs = build("gemma3n"), fitted("gemma3n", "karhunen"), []
enable(model)
faster, logits = torch.compile(model, backend="eager"), []
with torch.no_grad():
    for m in (model, faster, faster, faster):
        held = CompressedCache(m, made)
        logits.append(torch.cat([run(m, tokens(1, n, seed=n), held) for n in (40, 1, 1, 1)], dim=1))
        graphs.append(counters["stats"]["unique_graphs"])
        assert held.report().layers[1].how_read.startswith("bytes"), held.report().layers[1].how_read
        held.close()
for found in logits[1:]:
    assert_near(found, logits[0], LAYERS)  # a traced prompt has a mask where the plain one is causal
print(graphs, list(counters["graph_break"]))
"""


def test_a_forward_is_two_graphs() -> None:
    """Of a model with sliding layers, and with layers that read what others have cached. Counted in a process of its
    own: what checks types in the others is no part of the graph, and breaks it."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COUNTED], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    graphs = [int(n) for n in said[1 : said.index("]")].split(",")]
    assert graphs[0] == 0
    assert graphs[1] <= 6, "of a prompt, of a step, and of a step after any number of tokens: two of each"
    assert graphs[3] == graphs[2], "a third cache compiles nothing new"
    assert {_function(reason) for reason in said.split("Explanation")[1:]} == BEFORE_THE_FORWARD, said


@pytest.mark.parametrize(("family", "handed"), [("llama", True), ("gemma3n", True), ("gpt_oss", True), ("mla", False)])
def test_a_model_that_computes_with_its_cached_keys_is_left_to_python(family: str, handed: bool) -> None:
    assert hands_over(build(family)) == handed


def step_of(name: str) -> tuple[Any, Tensor]:
    """A layer that has taken a prompt and a step, and the step's queries."""
    model = build("llama")
    enable(model)
    held = CompressedCache(model, fitted("llama", name))
    run(model, tokens(2, N_PROMPT), held)
    layer = held.coded_layers()[0]
    layer.graph.shared = True
    layer.begin(in_graph=True)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, 2, 3, 12, generator=generator) for _ in range(2))
    torch.ops.karhunen.append(layer.graph.handle, key, value)
    return (held, layer), torch.randn(2, 4, 3, 12, generator=generator)


def arguments_of(operator: str, held: CompressedCache, layer: Any, query: Tensor) -> tuple[Any, ...]:
    """Of one call, for what the layer holds now."""
    n, vectors = held.get_seq_length(), torch.ones(2, 2, 1, 12)
    seen = torch.ones(2, 1, 3, n, dtype=torch.bool).tril(n - 3)
    return {
        "append": (layer.graph.handle, vectors, vectors),
        "dense": (layer.graph.handle, vectors, vectors, n + 1),
        "attend": (layer.graph.handle, query, seen, None, 0.3, None, 12),
    }[operator]


@pytest.mark.parametrize(
    ("operator", "name", "mode"),
    [("append", "karhunen", "bytes"), ("attend", "karhunen", "bytes"), ("append", "kivi", "dense"),
     ("dense", "kivi", "dense")],
)  # fmt: skip
def test_operators_are_what_they_say_to_a_compiler(operator: str, name: str, mode: str) -> None:
    """Schema, and what a compiler is told of the result; a call takes tokens in, so each check has its own."""
    register_operators()
    (held, layer), query = step_of(name)
    assert layer.graph.mode == mode
    for check in ("test_schema", "test_autograd_registration", "test_faketensor"):
        op = getattr(torch.ops.karhunen, operator).default
        torch.library.opcheck(op, arguments_of(operator, held, layer, query), test_utils=check)
        layer.graph.given = layer.graph.given or layer.updated(*(torch.ones(2, 2, 1, 12),) * 2)


def test_operators_say_whose_cache_is_gone_and_how_much_is_decoded() -> None:
    register_operators()
    (held, layer), _ = step_of("kivi")
    n, vectors = held.get_seq_length(), torch.ones(2, 2, 1, 12)
    key, value = torch.ops.karhunen.dense(layer.graph.handle, vectors, vectors, n + 1)
    assert key.shape == value.shape == (2, 2, n + 1, 12)
    with pytest.raises(ValueError, match="the cache of this forward is gone"):
        torch.ops.karhunen.append(torch.tensor([-1]), vectors, vectors)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.1, -0.3, 0.7, 0.2])])
def test_a_mask_that_bytes_cannot_be_read_under_is_served_decoded(softcap: float | None, sinks: Tensor | None) -> None:
    """By the definition, which is what bytes give under a mask that they can be read under."""
    register_operators()
    (held, layer), query = step_of("karhunen")
    n = held.get_seq_length()
    seen = torch.ones(2, 1, 3, n, dtype=torch.bool).tril(n - 3)
    settings = {"scale": 0.3, "softcap": softcap, "sinks": sinks}
    expected = attention_to(layer.graph.given, query, seen, **settings)
    assert layer.how_read.startswith("bytes")
    by_definition = attention_to(tuple(x.dense("asked for") for x in layer.graph.given), query, seen, **settings)
    assert_near(by_definition, expected, fused.TOLERANCE)
    other = seen.clone()
    other[:, :, 1, 5] = False
    attention_to(layer.graph.given, query, other, **settings)
    assert layer.how_read == "decoded (the mask differs between queries over coded tokens)"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("aot_eager", "karhunen"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("aot_eager", "kivi"), ("inductor", "karhunen"))),
    ],
)
def test_other_compilers_keep_every_call_and_their_order(backend: str, name: str) -> None:
    """They trace through autograd and drop what nobody reads; inductor also makes code of its own."""
    model, found = build("llama", num_hidden_layers=1), []
    enable(model)
    made = one_layer(name)
    for m in (model, torch.compile(model, backend=backend)):
        counters.clear()
        held = CompressedCache(m, made)
        found.append(torch.cat([run(m, tokens(2, n, seed=n), held) for n in (N_PROMPT, 1, 1)], dim=1))
        assert held.get_seq_length() == N_PROMPT + 2
        assert any(row.n_coded for row in held.report().layers)
    assert counters["stats"]["unique_graphs"] > 0
    assert_near(found[1], found[0], FUSED)


def test_a_compiled_model_generates_inside_the_context() -> None:
    model, made = build("llama", num_hidden_layers=1), one_layer("karhunen")
    with compressed(model, made) as session:
        expected = generate(model, tokens(1, N_PROMPT))
    model.compile(backend="eager")
    with compressed(model, made) as session:
        assert generate(model, tokens(1, N_PROMPT)) == expected
    assert any(row.n_coded for row in session.report().layers)
    assert counters["stats"]["unique_graphs"] > 0


def _function(reason: str) -> str:
    return reason.split("<function ")[1].split(" at ")[0].split(".")[-1]
