"""What transformers does to a cache, done to coded history: decoded or read from bytes, it is what its own cache does.

The twin is transformers' dynamic cache with the same numbers in it, and its own operations are the definition.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.test_attention import READ, codec, models
from tests.hf.test_cache import bits, cache_of, codec_of, generate, model_of, run, tokens
from tests.hf.tiny import build
from torch import Tensor

import karhunen
from karhunen.hf.cache import CompressedCache, dense_cache
from karhunen.hf.hooks import before_forward

N_PROMPT = 60
WAYS = pytest.mark.parametrize("way", ["decoded", "bytes"])
Change = Callable[[Any], Any]
OPERATIONS: dict[str, Change] = {
    "crop in the window": lambda held: held.crop(-3),
    "crop into the codes": lambda held: held.crop(-30),
    "crop to the sinks": lambda held: held.crop(-(N_PROMPT - 2)),
    "reorder": lambda held: held.reorder_cache(torch.tensor([2, 0, 1])),
    "reorder to one beam": lambda held: held.reorder_cache(torch.tensor([1, 1, 1])),
    "select": lambda held: held.batch_select_indices(torch.tensor([2, 0])),
    "repeat": lambda held: held.batch_repeat_interleave(2),
    "all of them": lambda held: [OPERATIONS[name](held) for name in ("crop into the codes", "reorder", "repeat")],
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def filled(way: str, b: int = 3) -> tuple[Any, CompressedCache]:
    model = models("llama")[way == "bytes"]
    held = CompressedCache(model, codec("llama"))
    run(model, tokens(b, N_PROMPT), held)
    assert held.layers[0].store.n_coded > 30
    return model, held


def twin_of(held: CompressedCache) -> Any:
    twin = dense_cache(model_of("llama"))
    for index, layer in enumerate(held.layers):
        twin.update(layer.keys.clone(), layer.values.clone(), index)
    return twin


def assert_same(model: Any, held: CompressedCache, twin: Any, seed: int = 5) -> None:
    step = tokens(held.layers[0].batch_size, 1, seed)
    assert_near(run(model, step, held), run(models("llama")[0], step, twin), READ)


@WAYS
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_coded_history_is_that_of_a_dynamic_cache(name: str, way: str) -> None:
    model, held = filled(way)
    twin = twin_of(held)
    OPERATIONS[name](held)
    OPERATIONS[name](twin)
    assert held.get_seq_length() == twin.get_seq_length()
    assert held.layers[1].keys.shape == twin.layers[1].keys.shape
    assert_same(model, held, twin)
    run(model, tokens(held.layers[0].batch_size, 25, seed=6), held)  # tokens leave the window again
    assert_same(model, held, twin_of(held), seed=7)


@WAYS
def test_a_copy_goes_its_own_way(way: str) -> None:
    model, held = filled(way, b=1)
    before, twin = bits(held), twin_of(held)
    copy = deepcopy(held)
    run(model, tokens(1, 30, seed=8), copy)
    copy.crop(-50)
    assert bits(held) == before
    assert_same(model, held, twin)


@WAYS
def test_a_reset_cache_begins_anew(way: str) -> None:
    model, held = filled(way)
    held.reset()
    run(model, tokens(1, N_PROMPT, seed=4), held)
    fresh = CompressedCache(model, codec("llama"))
    run(model, tokens(1, N_PROMPT, seed=4), fresh)
    assert bits(held) == bits(fresh)
    assert_same(model, held, twin_of(held))


@WAYS
def test_turns_of_many_sizes_read_what_is_held(way: str) -> None:
    model, held = filled(way, b=1)
    for seed, n in enumerate((1, 7, 1, 16, 2)):
        twin, turn = twin_of(held), tokens(1, n, seed)
        assert_near(run(model, turn, held), run(models("llama")[0], turn, twin), READ)


@pytest.mark.parametrize("enabled", [False, True], ids=["decoded", "enabled"])
def test_a_draft_of_the_same_model_is_accepted_whole(enabled: bool) -> None:
    """Twelve tokens in runs of five drafts and one of the model's own: three forwards, with the prompt's."""
    model = build("llama")
    if enabled:
        karhunen.enable(model)
    draft = build("llama")
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    widths: list[int] = []
    before_forward(model, lambda _, __, given: widths.append(given["input_ids"].shape[1]))
    text = tokens(1, 40)
    assert generate(model, text, cache_of("llama", "fine"), assistant_model=draft) == generate(draft, text)
    assert widths == [45, 6]


def test_two_models_with_codecs_of_their_own_take_turns() -> None:
    """A step of one, a step of the other: each as if it were alone."""
    pairs = [(model, codec_of(model, name)) for model, name in ((build("llama"), "karhunen"), (build("qwen3"), "kivi"))]
    for model, _ in pairs:
        karhunen.enable(model)

    def steps(held: list[Any]) -> Iterator[list[Tensor]]:
        for seed in range(12):
            yield [run(m, tokens(1, 40 if seed == 0 else 1, seed), h) for m, h in held]

    alone = [[out[0] for out in steps([(m, CompressedCache(m, c))])] for m, c in pairs]
    together = list(steps([(m, CompressedCache(m, c)) for m, c in pairs]))
    for index, mine in enumerate(alone):
        assert all(torch.equal(out, both[index]) for out, both in zip(mine, together, strict=True))


@WAYS
def test_many_threads_read_one_codec(way: str) -> None:
    model = models("llama")[way == "bytes"]

    def talk(seed: int) -> tuple[Tensor, list[bytes]]:
        with torch.no_grad():
            held = CompressedCache(model, codec("llama"))
            out = [run(model, tokens(1, 40 if n == 0 else 1, 100 * seed + n), held) for n in range(15)]
            held.close()
        return torch.cat(out, dim=1), bits(held)

    alone = [talk(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for (logits, held), (own_logits, own) in zip(pool.map(talk, range(6)), alone, strict=True):
            assert torch.equal(logits, own_logits)
            assert held == own
