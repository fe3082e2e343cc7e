"""Tokens dropped by score, head by head: key norms, SnapKV, H2O, alone and with quantization."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.closeness import LAYERS, SUM, assert_near
from tests.hf.tiny import build
from tests.synthetic import SMALL, cached, seeded, statistics
from torch import Tensor
from transformers import AttentionInterface

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.cache import CompressedCache
from karhunen.hf.describe import identity_of
from karhunen.hf.probe import cache_argument
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.gathered import Statistics
from karhunen.store.layer_store import LayerStore
from karhunen.windows.accumulated_attention import AccumulatedAttention
from karhunen.windows.attention_weights import weight_blocks
from karhunen.windows.budget import Share, Tokens
from karhunen.windows.key_norm import KeyNorm
from karhunen.windows.observed_attention import ObservedAttention
from karhunen.windows.score import Queries
from karhunen.windows.top_scored import TopScored

SCALE = 0.3
NORMS = TopScored(KeyNorm(), Tokens(20), Tokens(4), sink=2, again=True, page_tokens=8)
SNAP = TopScored(ObservedAttention(queries=6, kernel=3), Tokens(16), Tokens(6))
HEAVY = TopScored(AccumulatedAttention(), Tokens(12), Tokens(5), again=True, page_tokens=1)


def asked(b: int, t: int, seed: int = 3) -> Tensor:
    return torch.randn(b, SMALL.n_query_heads, t, SMALL.key_dim, generator=seeded(seed))


def weights(query: Tensor, keys: list[Tensor]) -> list[float]:
    """Softmax of one query over keys, written out."""
    scores = [math.exp(SCALE * float(query @ key)) for key in keys]
    return [s / sum(scores) for s in scores]


def fill(store: LayerStore, key: Tensor, value: Tensor, query: Tensor | None, sizes: list[int]) -> LayerStore:
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        asking = None if query is None else Queries(query[:, :, part], SCALE)
        store.append(key[:, :, part], value[:, :, part], queries=asking)
        start += size
    assert start == key.shape[2]
    return store


def held_indices(store: LayerStore, key: Tensor) -> list[list[list[int]]]:
    """Which tokens each head holds, by finding their keys, up to what adding up in another order changes."""
    kept = store.read()[0]
    same = ((kept[:, :, :, None] - key[:, :, None]).abs() < 1e-4).all(-1)  # [b h held t]
    assert bool((same.sum(-1) == 1).all())
    return same.int().argmax(-1).tolist()


def test_the_keys_of_lowest_norm_stay_in_every_head() -> None:
    key, value = cached(SMALL, 2, 90)
    store = fill(LayerStore(None, NORMS), key, value, None, [90])
    n_dropped = (90 - 2 - 20) // 8 * 8
    first_recent = 90 - (90 - 2 - n_dropped - (20 - 4))  # whom no decision has looked at
    for row in range(2):
        for head in range(2):
            norms = {i: float(key[row, head, i].norm()) for i in range(2, first_recent)}
            best = sorted(sorted(norms, key=lambda i: norms[i])[:16])
            expected = [0, 1, *best, *range(first_recent, 90)]
            assert held_indices(store, key)[row][head] == expected
            assert torch.equal(store.read()[1][row, head], value[row, head, expected])


@pytest.mark.parametrize("sizes", [[1] * 90, [7, 64, 19], [30, 60]])
def test_key_norms_choose_the_same_tokens_however_these_come(sizes: list[int]) -> None:
    key, value = cached(SMALL, 1, 90)
    at_once = fill(LayerStore(None, NORMS), key, value, None, [90]).read()
    for ours, theirs in zip(fill(LayerStore(None, NORMS), key, value, None, sizes).read(), at_once, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_snapkv_keeps_what_a_computation_by_hand_keeps(pooling: Any) -> None:
    """Votes of the last six queries, pooled over three neighbours, averaged over a group of two query heads."""
    n, n_voting = 40, 6
    key, value = cached(SMALL, 2, n)
    query, window = asked(2, n), replace(SNAP, score=ObservedAttention(n_voting, 3, pooling))
    store = fill(LayerStore(None, window), key, value, query, [n])
    for row in range(2):
        for head in range(2):
            scores = [0.0] * (n - n_voting)
            for q in (2 * head, 2 * head + 1):
                votes = [0.0] * n
                for m in range(n - n_voting, n):
                    for i, a in enumerate(weights(query[row, q, m], list(key[row, head, : m + 1]))):
                        votes[i] += a
                old = votes[: n - n_voting]
                for i in range(len(old)):
                    near = old[max(0, i - 1) : i + 2]
                    scores[i] += max(near) if pooling == "max" else sum(near) / 3
            best = sorted(range(n - n_voting), key=lambda i: -scores[i])[: 16 - n_voting]
            expected = [*sorted(best), *range(n - n_voting, n)]
            assert held_indices(store, key)[row][head] == expected
            assert torch.equal(store.read()[1][row, head], value[row, head, expected])


def test_snapkv_decides_once_and_keeps_all_that_comes_later() -> None:
    key, value = cached(SMALL, 1, 80)
    store = fill(LayerStore(None, SNAP), key, value, asked(1, 80), [40, 1, 1, 38])
    assert (store.n_tokens, store.n_dropped, store.read()[0].shape[2]) == (80, 24, 16 + 40)
    assert torch.equal(store.read()[0][:, :, -40:], key[:, :, 40:])
    short = fill(LayerStore(None, SNAP), key, value, asked(1, 80), [12, 68])
    assert short.n_dropped == 0, "a prompt within the budget stays whole, and so does what follows"


@pytest.mark.parametrize("sizes", [[1] * 40, [15, *[1] * 25]])
def test_h2o_accumulates_attention_as_a_simulation_token_by_token_does(sizes: list[int]) -> None:
    """Sums of the group's mean weights over the tokens held; the poorest of the older ones goes at every step."""
    n = sum(sizes)
    key, value = cached(SMALL, 1, n)
    query = asked(1, n)
    store = fill(LayerStore(None, HEAVY), key, value, query, sizes)
    for head in range(2):
        total: dict[int, float] = {}
        seen = 0
        for size in sizes:
            total |= dict.fromkeys(range(seen, seen + size), 0.0)
            for m in range(seen, seen + size):
                visible = [i for i in total if i <= m]
                for q in (2 * head, 2 * head + 1):
                    for i, a in zip(visible, weights(query[0, q, m], [key[0, head, i] for i in visible]), strict=True):
                        total[i] += a / 2
            seen += size
            while len(total) > 12:
                del total[min((i for i in total if i < seen - 5), key=lambda i: total[i])]
        assert held_indices(store, key)[0][head] == sorted(total)
        assert store.selection is not None
        assert store.selection.scores is not None
        assert store.selection.scores[0, head].tolist() == pytest.approx([total[i] for i in sorted(total)], rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3"])
@torch.no_grad()
def test_attention_weights_are_those_of_the_model(family: str) -> None:
    """Grouped heads, learned sinks and scales: against what eager attention says it used."""
    from karhunen.hf.capture import capturing

    model = build(family, attn_implementation="eager")
    ids = torch.randint(3, 99, (2, 14), generator=seeded(0))
    seen: list[Any] = []
    with capturing(model, seen.append) as run:
        run(ids, None)
    said = model(ids, output_attentions=True).attentions
    for found in seen:
        if found.attention is None or found.attention.window_tokens is not None:
            continue
        a = found.attention
        queries = Queries(a.query, a.scale, a.softcap, a.sinks)
        blocks = torch.cat(list(weight_blocks(queries, found.key)), dim=-2)
        assert_near(blocks.flatten(1, 2), said[found.layer], SUM)
        last = torch.cat(list(weight_blocks(queries, found.key, 3)), dim=-2)
        assert_near(last.flatten(1, 2), said[found.layer][:, :, -3:], SUM)


def test_weights_in_blocks_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = cached(SMALL, 1, 50)
    queries = Queries(asked(1, 20), SCALE)
    (whole,) = weight_blocks(queries, key)
    monkeypatch.setattr("karhunen.windows.attention_weights.BLOCK_ROWS", 7)
    assert_near(torch.cat(list(weight_blocks(queries, key)), dim=-2), whole, SUM)


# bytes


@pytest.mark.parametrize("window", [NORMS, SNAP, HEAVY], ids=["norms", "snap", "heavy"])
def test_what_is_dropped_holds_no_bytes(window: TopScored) -> None:
    key, value = cached(SMALL, 2, 120)
    store = fill(LayerStore(None, window), key, value, asked(2, 120), [100, 1, 19])
    account, held = store.account(), store.read()[0].shape[2]
    scores = 4 * 2 * 2 * held if window is HEAVY else 0
    assert account.side == scores, "sums of attention are counted"
    assert account.held == 2 * (2 * 2 * held * 32 * 4) + scores
    assert account.held == sum(t.untyped_storage().nbytes() for t in store.tensors().values())
    assert account.dense == key.nbytes + value.nbytes


@pytest.mark.parametrize("name", ["key_norm", "snapkv", "h2o", "snapkv_int4"])
@pytest.mark.parametrize("rate", [4, 8, 12])
def test_rates_are_met_by_bytes_of_a_long_context(name: str, rate: int) -> None:
    """2,048 tokens of prompt and 192 more, in bfloat16: within a tenth of what `RATES` promises."""
    from karhunen.evaluation.results.rates import settings

    options = settings(name).get(rate)
    if options is None:
        pytest.skip(f"{name} lists no {rate}×: what comes after the prompt stays and takes more than that alone")
    recipe = make(name, **options)
    shape = replace(SMALL, key_dim=64, value_dim=64)
    made = fit(recipe, statistics(recipe, shape))
    key, value = (x.bfloat16() for x in torch.randn(2, 1, 2, 2240, 64, generator=seeded(1)))
    query = torch.randn(1, 4, 2240, 64, generator=seeded(2))
    store = fill(LayerStore(made.layers.get(0), made.window), key, value, query, [2048, *[16] * 12])
    assert store.account().ratio == pytest.approx(rate, rel=0.1)


def composed(bits: int = 4) -> Codec:
    recipe = replace(make("snapkv_int4", bits=bits, group=32), window=replace(SNAP, coded=True, page_tokens=4))
    return fit(recipe, statistics(recipe, SMALL))


def test_what_a_score_leaves_is_coded_as_it_leaves_the_recent_window() -> None:
    """The kept tokens of each head, decoded, are those tokens taken through the codec."""
    made, (key, value) = composed(), cached(SMALL, 2, 60)
    query = asked(2, 60)
    store = fill(LayerStore(made.layers[0], made.window), key, value, query, [40, 13, 7])
    pure = fill(LayerStore(None, SNAP), key, value, query, [40, 20])
    assert (store.n_dropped, store.n_coded) == (24, (16 + 20 - 6) // 4 * 4)
    edge = store.n_coded
    for slot, ours, theirs in zip(("key", "value"), store.read(), pure.read(), strict=True):
        side = made.layers[0].key if slot == "key" else made.layers[0].value
        expected = side.distort(theirs[:, :, :edge], torch.arange(edge).expand(2, -1)).to(theirs.dtype)
        assert torch.equal(ours[:, :, :edge], expected)
        assert torch.equal(ours[:, :, edge:], theirs[:, :, edge:])
    account = store.account()
    assert account.codes == 2 * 2 * 2 * edge * 32 * 4 // 8
    assert account.side == 2 * 2 * 2 * edge * 2 * 2


# refusals


def test_queries_that_were_not_shown_are_asked_for() -> None:
    key, value = cached(SMALL, 1, 30)
    with pytest.raises(ValueError, match=r"ObservedAttention .* the queries of 30 tokens were not shown"):
        LayerStore(None, SNAP).append(key, value)


def test_a_store_does_not_end_where_tokens_were_chosen() -> None:
    key, value = cached(SMALL, 1, 60)
    store = fill(LayerStore(None, SNAP), key, value, asked(1, 60), [40, 20])
    with pytest.raises(ValueError, match=r"24 of the first 34 tokens were dropped, so .* cannot end at token 33"):
        store.crop(33)
    store.crop(35)
    assert (store.n_tokens, store.read()[0].shape[2]) == (35, 11)
    heavy = fill(LayerStore(None, HEAVY), key, value, asked(1, 60), [60])
    with pytest.raises(ValueError, match="summed up what the newest tokens attend to"):
        heavy.crop(59)
    heavy.crop(0)
    assert heavy.n_tokens == heavy.account().held == 0


def test_rows_padded_on_the_left_are_refused() -> None:
    key, value = cached(SMALL, 2, 10)
    with pytest.raises(ValueError, match="cannot serve rows padded on the left"):
        LayerStore(None, NORMS).append(key, value, torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"score": ObservedAttention(), "recent": Tokens(8)}, "gives the 32 newest tokens no score"),
        ({"score": ObservedAttention(), "again": True}, "decides once; leave `again` out"),
        ({"again": True, "coded": True}, "a token that is coded is not chosen again"),
        ({"sink": -1}, "use 0 or more"),
        ({"page_tokens": 0}, "use 0 or more, and 1 or more"),
    ],
)
def test_a_window_that_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TopScored(**given)


def test_a_recipe_in_which_heads_cannot_keep_other_tokens_is_refused() -> None:
    coded = TopScored(KeyNorm(), coded=True)
    for frame in (RopeFrame(1), RopeFrame(joined=True), RopeFrame(center=True)):
        with pytest.raises(ValueError, match=r"each head keeps other tokens, and RopeFrame\("):
            Recipe("r", Side(frame=frame), Side(), coded)
    with pytest.raises(ValueError, match="goes with a side"):
        Recipe("r", None, None, coded)
    with pytest.raises(ValueError, match="goes without a side"):
        replace(make("int4"), window=TopScored())


@pytest.mark.parametrize("part", [0.0, 1.5])
def test_a_share_that_is_none_is_refused(part: float) -> None:
    with pytest.raises(ValueError, match="is not a budget"):
        Share(part)


# in a model


def bare(model: Any, window: TopScored) -> Codec:
    return fit(Recipe("chosen", None, None, window), Statistics(identity_of(model), {}))


@pytest.mark.parametrize("window", [NORMS, SNAP, replace(HEAVY, page_tokens=4)], ids=["norms", "snap", "heavy"])
@torch.no_grad()
def test_a_model_attends_to_the_tokens_that_each_head_keeps(window: TopScored) -> None:
    """One layer, against a dense run whose mask hides from every query head what its KV head has dropped by then."""
    model = build("llama", attn_implementation="eager", num_hidden_layers=1)
    ids = torch.randint(0, 99, (1, 70), generator=seeded(0))
    whole = CompressedCache(model, fit(make("full"), Statistics(identity_of(model), {})))
    model(ids, use_cache=True, **{cache_argument(model): whole})
    key = whole.layers[0].keys
    cache, visible, logits, start = CompressedCache(model, bare(model, window)), torch.ones(4, 70, 70).tril(), [], 0
    for size in [40, 1, 1, 8, *[1] * 20]:
        store = cache.layers[0].store
        if store.n_tokens:
            for head, kept in enumerate(held_indices(store, key[:, :, :start])[0]):
                gone = sorted(set(range(start)) - set(kept))
                visible[2 * head : 2 * head + 2, start : start + size, gone] = 0
        part = ids[:, start : start + size]
        logits.append(model(part, use_cache=True, **{cache_argument(model): cache}).logits)
        start += size
    hidden = torch.where(visible.bool(), 0.0, torch.finfo(torch.float32).min)[None]
    assert_near(torch.cat(logits, dim=1), model(ids, attention_mask=hidden).logits, LAYERS)
    assert cache.layers[0].store.n_dropped > 20


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("window", [SNAP, HEAVY], ids=["snap", "heavy"])
@torch.no_grad()
def test_generation_with_beams_and_rows_leaves_the_model_as_it_was(family: str, window: TopScored) -> None:
    model = build(family)
    before, names = model.config._attn_implementation, list(AttentionInterface().valid_keys())
    ids = torch.randint(3, 99, (2, 50), generator=seeded(0))
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    for n_beams in (1, 3):
        cache = CompressedCache(model, bare(model, window))
        out = model.generate(ids, **{cache_argument(model): cache}, num_beams=n_beams, **settings)
        full = [layer for layer in cache.layers if hasattr(layer, "store")]
        assert out.shape == (2, 58)
        assert {layer.store.n_dropped for layer in full} == {50 - 16 if window is SNAP else 57 - 12}
        assert (model.config._attn_implementation, list(AttentionInterface().valid_keys())) == (before, names)
    alone = CompressedCache(model, bare(model, window))
    row = model.generate(ids[1:], **{cache_argument(model): alone}, **settings)
    together = CompressedCache(model, bare(model, window))
    assert torch.equal(model.generate(ids, **{cache_argument(model): together}, **settings)[1:], row)


@torch.no_grad()
def test_an_error_in_the_forward_leaves_the_model_as_it_was() -> None:
    model = build("llama")
    before, names = model.config._attn_implementation, list(AttentionInterface().valid_keys())
    cache = CompressedCache(model, bare(model, SNAP))

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(torch.arange(30)[None], use_cache=True, **{cache_argument(model): cache})
    handle.remove()
    assert (model.config._attn_implementation, list(AttentionInterface().valid_keys())) == (before, names)
    cache.close()
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks


@torch.no_grad()
def test_a_model_whose_queries_are_not_seen_is_refused() -> None:
    model, latent = build("bloom"), build("mla")
    made = bare(model, SNAP)
    with pytest.raises(ValueError, match="adds a bias for the distance between tokens"):
        CompressedCache(model, made)
    with pytest.raises(ValueError, match="chooses tokens by the queries that read them, and in layer 0 its attention"):
        CompressedCache(latent, bare(latent, SNAP))


def test_the_defaults_are_the_papers() -> None:
    assert make("snapkv").window == TopScored(ObservedAttention(32, 7, "max"), Tokens(1024), Tokens(32))
    assert make("h2o").window == TopScored(AccumulatedAttention(), Share(0.2), Share(0.1), again=True)
    assert make("key_norm").window == TopScored(KeyNorm(), Share(0.5), Tokens(0), again=True)
