"""`attn_implementation="karhunen"` in tiny models of many families: the decoded path's numbers, without decoding."""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.test_cache import codec_of, generate, run, tokens
from tests.hf.tiny import build
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import karhunen
from karhunen.attention import fused
from karhunen.codec import Codec
from karhunen.hf.attention import NAME, register
from karhunen.hf.cache import CompressedCache
from karhunen.hf.compressed import compressed

READ = 3 * fused.TOLERANCE
"""Of logits, after some layers that read bytes."""
FAMILIES = ["llama", "mha", "mqa", "qwen3", "gemma3", "gemma2", "gpt_oss", "gpt_neox", "phi", "glm", "cohere"]
CHANGES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "gemma2": {
        "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
KIND = {"mha": "llama", "mqa": "llama"}
N_PROMPT = 45  # past sinks, a recent window and several pages


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def models(family: str) -> tuple[Any, Any]:
    """The same weights twice: read by the model's usual attention, and by karhunen's."""
    plain = build(KIND.get(family, family), **CHANGES.get(family, {}))
    fast = deepcopy(plain)
    karhunen.enable(fast)
    return plain, fast


@cache
def codec(family: str, name: str = "karhunen") -> Codec:
    return codec_of(models(family)[0], name)


def logits(family: str, prompt: Tensor, *steps: Tensor, name: str = "karhunen", **arguments: Any) -> list[Tensor]:
    """Of both models over the same steps, from caches of the same codec."""
    found = []
    for model in models(family):
        held = CompressedCache(model, codec(family, name))
        seen = arguments.get("attention_mask")
        out, given = [], prompt.shape[1]
        run(model, prompt, held, **({} if seen is None else _padded(seen, prompt.shape[1], prompt.shape[1])))
        for step in steps:
            given += step.shape[1]
            out.append(run(model, step, held, **({} if seen is None else _padded(seen, given, step.shape[1]))))
        found.append(torch.cat(out, dim=1))
        if model.config._attn_implementation == NAME:
            assert_read_from_bytes(held, name)
    return found


def _padded(seen: Tensor, n: int, m: int) -> dict[str, Tensor]:
    mask = torch.cat([seen, torch.ones(len(seen), n - seen.shape[1], dtype=seen.dtype)], dim=1)[:, :n]
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, -m:]}


def assert_read_from_bytes(held: CompressedCache, name: str) -> None:
    rows = [row for row in held.report().layers if row.n_coded]
    assert rows
    for row in rows:
        assert row.how_read.startswith("bytes" if name == "karhunen" else "coefficients"), row.how_read
    assert held.report().transient_bytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_path_gives_the_logits_of_the_decoded_one(family: str) -> None:
    prompt = tokens(2, N_PROMPT)
    steps = [tokens(2, n, seed=n) for n in (1, 1, 7, 1)]
    decoded, ours = logits(family, prompt, *steps)
    assert_near(ours, decoded, READ)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("name", ["karhunen", "nova_kv"])
def test_rows_padded_on_the_left(family: str, name: str) -> None:
    seen = torch.ones(3, N_PROMPT, dtype=torch.int64)
    seen[1, :5] = seen[2, :20] = 0
    steps = [tokens(3, n, seed=n) for n in (1, 7, 1)]
    decoded, ours = logits(family, tokens(3, N_PROMPT), *steps, name=name, attention_mask=seen)
    assert_near(ours, decoded, READ)


@pytest.mark.parametrize("n", [9, 10, 13, 14, 15, 18])
def test_prompts_at_the_borders_of_the_window(n: int) -> None:
    steps = [tokens(1, 1, seed=i) for i in range(6)]
    plain, fast = (torch.cat([_step_by_step(model, n, steps)], dim=1) for model in models("llama"))
    assert_near(fast, plain, READ)


def _step_by_step(model: Any, n: int, steps: list[Tensor]) -> Tensor:
    held = CompressedCache(model, codec("llama"))
    run(model, tokens(1, n), held)
    return torch.cat([run(model, step, held) for step in steps], dim=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    found = []
    for model in models("llama"):
        half = deepcopy(model).to(dtype)
        held = CompressedCache(half, codec_of(half, "karhunen"))
        run(half, tokens(1, N_PROMPT), held)
        found.append(run(half, tokens(1, 1, seed=1), held).float())
    # the hidden state is rounded some ten times a layer
    assert (found[0] - found[1]).norm() < 20 * step * found[0].norm()


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}], ids=["greedy", "beams", "chunks"]
)
def test_generation_gives_the_same_tokens(settings: dict[str, Any]) -> None:
    plain, fast = (
        generate(model, tokens(2, N_PROMPT), CompressedCache(model, codec("llama")), **settings)
        for model in models("llama")
    )
    assert fast == plain


def test_assisted_generation_gives_the_same_tokens() -> None:
    helper = build("llama", num_hidden_layers=1)
    plain, fast = (
        generate(model, tokens(1, N_PROMPT), CompressedCache(model, codec("llama")), assistant_model=helper)
        for model in models("llama")
    )
    assert fast == plain


def test_one_line_use_reads_bytes_and_leaves_the_attention_as_it_was() -> None:
    model = models("llama")[0]
    with compressed(model, codec("llama")) as session:
        generate(model, tokens(1, N_PROMPT))
    assert_read_from_bytes(session.cache, "karhunen")
    assert model.config._attn_implementation == "sdpa"


def test_one_line_use_keeps_an_attention_that_was_chosen() -> None:
    model = build("llama", attn_implementation="eager")
    with compressed(model, codec_of(model, "karhunen")) as session:
        generate(model, tokens(1, N_PROMPT))
    assert session.cache is not None
    assert all("attn_implementation is not karhunen" in row.how_read for row in session.report().layers if row.n_coded)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_ordinary_cache_behaves_as_before(family: str) -> None:
    plain, fast = models(family)
    prompt, step = tokens(2, N_PROMPT), tokens(2, 1, seed=1)
    found = []
    for model in (plain, fast):
        held = DynamicCache(config=model.config)
        found.append(torch.cat([run(model, prompt, held), run(model, step, held)], dim=1))
    assert_near(found[1], found[0], READ)


def test_a_model_may_be_loaded_with_it(tmp_path: Any) -> None:
    build("llama").save_pretrained(tmp_path)
    register()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    assert NAME in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


# what bytes cannot serve


@pytest.mark.parametrize(("name", "why"), [("karhunen", "latent attention"), ("int8", "computes with its cached keys")])
def test_latent_attention_is_decoded_and_says_why(name: str, why: str) -> None:
    decoded, ours = (_one_step(model, codec("mla", name)) for model in models("mla"))
    assert_near(ours[0], decoded[0], READ)
    assert all(why in row.how_read for row in ours[1].report().layers if row.n_coded)
    assert ours[1].report().transient_bytes > 0


def _one_step(model: Any, made: Codec, **arguments: Any) -> tuple[Tensor, CompressedCache]:
    held = CompressedCache(model, made)
    run(model, tokens(1, N_PROMPT), held)
    return run(model, tokens(1, 1, seed=1), held, **arguments), held


def test_entropy_coded_pages_are_decoded_and_say_why() -> None:
    decoded, ours = (_one_step(model, codec("llama", "kvtc:bits=4")) for model in models("llama"))
    assert_near(ours[0], decoded[0], READ)
    assert all("entropy-coded" in row.how_read for row in ours[1].report().layers if row.n_coded)


def test_a_mask_of_the_callers_own_is_obeyed() -> None:
    mask = torch.ones(1, N_PROMPT + 1, dtype=torch.int64)
    mask[0, 17] = 0
    decoded, ours = (_one_step(model, codec("llama"), attention_mask=mask) for model in models("llama"))
    assert_near(ours[0], decoded[0], READ)
    assert_read_from_bytes(ours[1], "karhunen")


def test_a_mask_that_differs_between_queries_is_served_from_decoded_tokens() -> None:
    seen = torch.ones(1, 1, 2, N_PROMPT + 2, dtype=torch.bool).tril(N_PROMPT)
    seen[0, 0, 0, 12] = False
    found = []
    for model in models("llama"):
        held = CompressedCache(model, codec("llama"))
        run(model, tokens(1, N_PROMPT), held)
        found.append((run(model, tokens(1, 2, seed=1), held, attention_mask=seen), held))
    assert_near(found[1][0], found[0][0], READ)
    assert "differs between queries" in found[1][1].report().layers[0].how_read


def test_the_usual_attention_is_named_as_the_reason() -> None:
    _, held = _one_step(models("llama")[0], codec("llama"))
    assert all("attn_implementation is not karhunen" in row.how_read for row in held.report().layers if row.n_coded)


def test_gradients_take_the_decoded_way() -> None:
    model = models("llama")[1]
    held = CompressedCache(model, codec("llama"))
    run(model, tokens(1, N_PROMPT), held)
    with torch.enable_grad():
        out = run(model, tokens(1, 1, seed=1), held)
    assert out.requires_grad
    assert "gradients" in held.report().layers[-1].how_read
