"""Dropped tokens: StreamingLLM alone and with quantization, in the store and in a model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.closeness import LAYERS, SUM, assert_near
from tests.hf.tiny import build
from tests.synthetic import SMALL, cached, statistics

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.describe import identity_of
from karhunen.hf.probe import cache_argument
from karhunen.recipe import Recipe
from karhunen.recipes import make
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.identity import ModelIdentity
from karhunen.store.layer_store import LayerStore
from karhunen.windows.partition import Place
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.streaming import Streaming

PURE = Streaming(sink=3, recent=20, coded=0, page_tokens=8)
COMPOSED = Streaming(sink=3, recent=20, coded=32, page_tokens=8)


def composed(name: str = "int4") -> Codec:
    recipe = replace(make(name), window=COMPOSED)
    return fit(recipe, statistics(recipe, SMALL))


def test_a_streaming_window_is_bounded_and_moves_in_pages() -> None:
    for n in range(400):
        parts = COMPOSED.partition(n, 4)
        assert parts.n_tokens == n
        assert parts.count(Place.CODED) <= 32
        assert parts.count(Place.EXACT) <= 3 + 20 + 7
        assert parts.count(Place.DROPPED) % 8 == parts.count(Place.CODED) % 8 == 0
    assert COMPOSED.partition(400, 1).count(Place.DROPPED) == (400 - 23) // 8 * 8 - 32


@pytest.mark.parametrize("sizes", [[1], [7, 64, 3], [300]])
def test_a_dropped_token_holds_no_bytes_and_the_others_are_as_they_were(sizes: list[int]) -> None:
    key, value = cached(SMALL, 2, 300)
    store, start = LayerStore(None, PURE), 0
    while start < 300:
        for size in sizes:
            store.append(key[:, :, start : start + size], value[:, :, start : start + size])
            start += size
    n_dropped = (300 - 23) // 8 * 8
    assert (store.n_tokens, store.n_dropped) == (300, n_dropped)
    kept = [*range(3), *range(3 + n_dropped, 300)]
    assert all(torch.equal(got, x[:, :, kept]) for got, x in zip(store.read(), (key, value), strict=True))
    account = store.account()
    assert account.held == sum(t.untyped_storage().nbytes() for t in store.tensors().values())
    assert account.ratio == pytest.approx(300 / len(kept))


@pytest.mark.parametrize("name", ["int4", "kivi", "kvtc", "karhunen", "ott"])
def test_a_token_is_exact_then_coded_then_gone(name: str) -> None:
    """With eviction the coded tokens are those of the same codec without it, byte for byte in what they decode to."""
    recipe = replace(make(name), window=COMPOSED)
    made = fit(recipe, statistics(recipe, SMALL))
    key, value = cached(SMALL, 1, 200)
    streaming, whole = LayerStore(made.layers[0], COMPOSED), LayerStore(made.layers[0], SinkRecent(3, 20, 8))
    for start in range(0, 200, 9):
        streaming.append(key[:, :, start : start + 9], value[:, :, start : start + 9])
    whole.append(key, value)
    assert streaming.n_coded == 32
    assert streaming.n_dropped == whole.n_coded - 32
    kept = [*range(3), *range(3 + streaming.n_dropped, 200)]
    for ours, theirs in zip(streaming.read(), whole.read(), strict=True):
        assert_near(ours, theirs[:, :, kept], SUM)


def test_a_store_cannot_go_back_to_where_tokens_are_gone() -> None:
    key, value = cached(SMALL, 1, 200)
    store = LayerStore(composed().layers[0], COMPOSED)
    store.append(key, value)
    with pytest.raises(ValueError, match=r"144 tokens after the first 3 were dropped, so .* cannot end at token 90"):
        store.crop(90)
    store.crop(170)
    assert (store.n_tokens, store.n_dropped) == (170, 144)
    assert store.read()[0].shape[2] == 26
    store.crop(2)
    assert (store.n_tokens, store.n_dropped, store.read()[0].shape[2]) == (2, 0, 2)


def test_rows_padded_on_the_left_are_refused() -> None:
    key, value = cached(SMALL, 2, 10)
    with pytest.raises(ValueError, match="cannot serve rows padded on the left"):
        LayerStore(None, PURE).append(key, value, torch.tensor([0, 3]))


def model_codec(model: Any, recipe: Recipe) -> Codec:
    return fit(recipe, Statistics(identity_of(model), {}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@torch.no_grad()
def test_a_model_with_a_streaming_cache_attends_to_sinks_and_recent_tokens_only(family: str) -> None:
    """Against a dense run of the same tokens, whose mask hides from each query what the window has dropped by then."""
    model = build(family, attn_implementation="eager")
    ids = torch.randint(0, 99, (1, 90), generator=torch.Generator().manual_seed(0))
    cache = CompressedCache(model, model_codec(model, Recipe("s", None, None, PURE)))
    chunks = [40, 1, 1, 20, *[1] * 28]
    logits, start = [], 0
    for size in chunks:
        part = ids[:, start : start + size]
        logits.append(model(part, use_cache=True, **{cache_argument(model): cache}).logits)
        start += size
    visible = torch.ones(90, 90).tril().bool()
    start = 0
    for size in chunks:
        dropped = PURE.partition(start, 1).count(Place.DROPPED)
        visible[start : start + size, 3 : 3 + dropped] = False
        start += size
    expected = model(ids, attention_mask=_masks(model, visible)).logits
    assert_near(torch.cat(logits, dim=1), expected, LAYERS)
    report = cache.report()
    full = [layer for layer in report.layers if layer.kind == "full"]
    assert all(layer.account.ratio > 2 for layer in full)
    assert all(layer.reason.startswith("the recipe drops tokens and codes none") for layer in full)


def _masks(model: Any, visible: torch.Tensor) -> Any:
    """Additive masks; Gemma's sliding layers keep their own."""
    window = getattr(model.config, "sliding_window", None)
    hidden = torch.finfo(torch.float32).min
    full = torch.where(visible, 0.0, hidden)[None, None]
    if window is None:
        return full
    distance = torch.arange(90)[:, None] - torch.arange(90)
    near = (distance >= 0) & (distance < window)
    return {"full_attention": full, "sliding_attention": torch.where(near, 0.0, hidden)[None, None]}


@torch.no_grad()
def test_generation_runs_with_eviction_and_quantization_in_one_window() -> None:
    model = build("llama")
    recipe = replace(make("int4"), window=COMPOSED)
    shapes = identity_of(model).layers
    gathered = statistics(recipe, *shapes)
    made = fit(recipe, replace(gathered, model=identity_of(model)))
    cache = CompressedCache(model, made)
    ids = torch.randint(0, 99, (1, 70), generator=torch.Generator().manual_seed(0))
    out = model.generate(ids, **{cache_argument(model): cache}, max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert out.shape == (1, 100)
    assert cache.get_seq_length() == 99
    assert cache.layers[0].store.n_dropped == 40
    assert cache.report().total.ratio > 2


def test_the_default_window_is_the_papers() -> None:
    assert make("streaming_llm").window == Streaming(sink=4, recent=1020)
    assert isinstance(ModelIdentity("a", "b", "c", (SMALL,)), ModelIdentity)
