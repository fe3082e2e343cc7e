"""Several contexts of one model, in threads, tasks and any order: each gets its own, and the model is left alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any

import pytest
import torch
from tests.hf.tiny import build
from torch import Tensor
from transformers import AttentionInterface

from karhunen import recipes
from karhunen.calibration.calibrate import calibrate
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.hf.compressed import compressed

N_PROMPT = 150


def ids(seed: int, n: int = N_PROMPT) -> Tensor:
    return torch.randint(3, 99, (1, n), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, seed: int, **settings: Any) -> list[int]:
    found = model.generate(ids(seed), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None, **settings)
    return found[0, N_PROMPT:].tolist()


@cache
def codec(name: str) -> Codec:
    recipe = recipes.make(name)
    return fit(recipe, calibrate(build("llama"), ids(0, 300), recipe.needs()))


def marks(model: Any) -> Any:
    hooks = [
        (name, len(module._forward_pre_hooks), len(module._forward_hooks)) for name, module in model.named_modules()
    ]
    return "generate" in vars(model), model.config._attn_implementation, hooks


def test_contexts_may_close_in_any_order() -> None:
    model = build("llama")
    before = marks(model)
    first, second = compressed(model, codec("int8")), compressed(model, codec("int4"))
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    generated(model, 1)
    assert inner.report().recipe == "int4"
    assert inner.report().total.codes > 0
    assert outer.cache is None
    second.__exit__(None, None, None)
    assert marks(model) == before


@pytest.mark.parametrize("name", ["int4:group=4", "snapkv:kept=40", "h2o"])
def test_threads_of_one_model_do_not_disturb_each_other(name: str) -> None:
    model = build("llama")
    before = marks(model)
    with compressed(model, codec(name)):
        alone = [generated(model, seed) for seed in range(3)]
    together = threading.Barrier(3)

    def work(seed: int) -> list[list[int]]:
        together.wait()
        found: list[list[int]] = []
        for _ in range(2):
            with compressed(model, codec(name)) as session:
                found.append(generated(model, seed))
                assert session.report().layers[0].n_tokens == N_PROMPT + 5
        return found

    with ThreadPoolExecutor(3) as pool:
        for seed, found in enumerate(pool.map(work, range(3))):
            assert found == [alone[seed]] * 2
    assert marks(model) == before
    model(input_ids=ids(1))


def test_a_thread_or_task_gets_the_codec_that_it_opened() -> None:
    model = build("llama")

    def turn(name: str) -> Any:
        context = copy_context()
        manager = compressed(model, codec(name))
        return context, manager, context.run(manager.__enter__)

    tasks = [turn(name) for name in ("int8", "int4")]
    for context, _, _ in tasks:
        context.run(generated, model, 1)
    assert [session.report().recipe for _, _, session in tasks] == ["int8", "int4"]
    for context, manager, _ in tasks:
        context.run(manager.__exit__, None, None, None)
    assert "generate" not in vars(model)


def test_a_thread_that_opened_none_is_served_by_the_context_around_it() -> None:
    """As one that runs `generate` for a streamer."""
    model = build("llama")
    with compressed(model, codec("int4:group=4")) as session:
        thread = threading.Thread(target=generated, args=(model, 1))
        thread.start()
        thread.join()
        assert session.report().total.codes > 0


def test_a_generate_put_around_ours_stays_and_compresses_no_more() -> None:
    model = build("llama")
    with compressed(model, codec("int8")) as session:
        ours = model.generate
        model.generate = lambda *args, **kwargs: ours(*args, **kwargs)
        generated(model, 1)
    assert session.report().layers[0].n_tokens == N_PROMPT + 5
    held = session.cache
    assert generated(model, 1) == generated(build("llama"), 1)
    assert session.cache is held


def test_guidance_reports_the_cache_of_the_prompt_not_that_of_its_unconditional_twin() -> None:
    model = build("llama")
    with compressed(model, codec("int8")) as session:
        generated(model, 1, guidance_scale=2.0)
    assert session.report().layers[0].n_tokens == N_PROMPT + 5


def test_an_error_in_one_thread_leaves_another_ones_forward_alone() -> None:
    model, names = build("llama"), set[str]()
    with compressed(model, codec("snapkv:kept=40")):
        names |= set(AttentionInterface().valid_keys())
        with pytest.raises(ValueError, match="prefill_chunk_size=32 cuts the prompt, and recipe snapkv"):
            generated(model, 1, prefill_chunk_size=32)
        assert len(generated(model, 1)) == 6
    assert set(AttentionInterface().valid_keys()) == names
