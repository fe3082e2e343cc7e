"""The worker's half: what one cache holds another gets back; what is damaged, missing or cut is never restored."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.serving.stand_in import BLOCK, FULL, SLIDING, WINDOW, Cache, SideBySide, Transposed, plan_of

from karhunen.pages import cut_heads
from karhunen.serving.page_names import window_key
from karhunen.serving.vllm.loading import Outcome
from karhunen.serving.vllm.orders import Load, Orders, Save, SaveWindow
from karhunen.stores import MemoryStore

N_PAGES, PAGE = 3, BLOCK
KEYS = tuple(f"{i:032x}" for i in range(N_PAGES))
FROM, INTO = [5, 9, 2], [30, 31, 33]
N = N_PAGES * PAGE


def save(cache: Cache, windows: list[SaveWindow] | None = None) -> None:
    n_groups = len(cache.plan.layout.groups)
    blocks = (tuple(FROM), *[()] * (n_groups - 1))
    cache.worker.save(Orders(saves=[Save(KEYS, 0, blocks)], windows=windows or []))
    assert cache.worker.wait(30), "pages were not stored in time"


def load(cache: Cache, start: int = 0, first_page: int = 0, keys: tuple[str, ...] = KEYS) -> Outcome:
    n_groups = len(cache.plan.layout.groups)
    order = Load("a", keys, first_page, start, N, (tuple(INTO),) * n_groups)
    cache.worker.start_loads(Orders(loads=[order]))
    ended = Outcome()
    for _ in range(300):
        ended = cache.worker.ended(Orders())
        if ended.finished:
            return ended
        threading.Event().wait(0.02)
    raise AssertionError("the load did not end")


def saved(impl: Any = None, *shapes: Any, **settings: Any) -> Cache:
    cache = Cache(plan_of(*(shapes or (FULL, FULL)), **settings), impl=impl)
    cache.fill(N, FROM)
    save(cache)
    return cache


@pytest.mark.parametrize("impl", [SideBySide(), Transposed()], ids=["side by side", "transposed"])
def test_another_cache_gets_what_the_codec_decodes(impl: Any) -> None:
    cache = saved(impl)
    assert load(cache) == Outcome({"a"})
    pages = cache.plan.page_codec("")
    wanted = pages.decode_pages([cache.store.inner.get(key) or b"" for key in KEYS])
    for index in (0, 1):
        got = cache.read(index, INTO)
        assert torch.equal(got[0], wanted[index][0]) and torch.equal(got[1], wanted[index][1])
        exact = cache.vectors(index, N)
        assert float((got[0] - exact[0]).norm() / exact[0].norm()) < 0.02  # int8


def test_what_was_saved_and_loaded_is_counted() -> None:
    cache = saved()
    load(cache)
    counts = cache.worker.recorder.take()
    assert (counts["pages_saved"], counts["pages_loaded"]) == (N_PAGES, N_PAGES)
    stored = sum(len(cache.store.inner.get(key) or b"") for key in KEYS)
    assert counts["bytes_stored"] == counts["bytes_loaded"] == stored
    assert counts["bytes_saved"] == N * 2 * FULL.elements_per_token * 4 - stored
    assert len(counts["encode_seconds"]) == len(counts["decode_seconds"]) == 1


def test_tokens_that_the_engine_has_are_not_written() -> None:
    cache = saved()
    start = PAGE + 5
    assert not load(cache, start=start, first_page=1, keys=KEYS[1:]).invalid_blocks
    keys = cache.read(0, INTO)[0]
    assert not bool(keys[:, :start].any()) and bool(keys[:, start:].any(-1).all())


def damage(store: Any, key: str) -> None:
    page = bytearray(store.get(key))
    page[-3] ^= 1
    store.put(key, bytes(page))


@pytest.mark.parametrize("what", ["missing", "damaged", "of another place"])
def test_what_is_not_right_and_what_follows_is_reported(what: str) -> None:
    cache = saved()
    store = cache.store.inner
    if what == "missing":
        store.remove(KEYS[1])
    elif what == "damaged":
        damage(store, KEYS[1])
    else:
        store.put(KEYS[1], store.get(KEYS[2]) or b"")
    assert load(cache) == Outcome({"a"}, set(), set(INTO[1:]))
    assert bool(cache.read(0, INTO)[0][:, :PAGE].any())
    assert not store.has(KEYS[1]), "the page would be refused for ever"
    assert cache.worker.recorder.take().get("refusals", 0) == (what != "missing")


def test_a_load_that_raises_is_reported() -> None:
    cache = saved()
    cache.worker.layers[1].write = None  # type: ignore[assignment,method-assign]
    assert load(cache) == Outcome({"a"}, set(), set(INTO))
    assert "TypeError" in cache.store.counts.last_reason


def test_another_models_pages_are_refused() -> None:
    store = MemoryStore()
    cache = Cache(plan_of(FULL, FULL), store)
    cache.fill(N, FROM)
    cache.worker.save(Orders(weights="a" * 32, saves=[Save(KEYS, 0, (tuple(FROM),))]))
    cache.worker.wait(30)
    other = Cache(plan_of(FULL, FULL), store)
    other.worker.start_loads(Orders("b" * 32, [Load("a", KEYS, 0, 0, N, (tuple(INTO),))]))
    while not (ended := other.worker.ended(Orders())).finished:
        threading.Event().wait(0.02)
    assert ended.invalid_blocks == set(INTO) and not bool(other.read(0, INTO)[0].any())
    assert "other weights" in other.store.counts.last_reason


def test_a_full_queue_drops_pages_and_says_so() -> None:
    cache = Cache(plan_of(FULL, FULL, max_queued_bytes=1))
    cache.fill(N, FROM)
    let = threading.Event()
    keep = cache.store.inner.put
    cache.store.inner.put = lambda key, data: (let.wait(10), keep(key, data))[1]  # type: ignore[method-assign]
    for key in KEYS:
        cache.worker.save(Orders(saves=[Save((key,), 0, ((FROM[0],),))]))
    let.set()
    assert cache.worker.wait(30)
    assert cache.worker.recorder.take()["pages_dropped"] == N_PAGES - 1


def test_a_store_that_cannot_keep_a_page_is_counted() -> None:
    class Full(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    cache = Cache(plan_of(FULL, FULL), Full())
    cache.fill(N, FROM)
    save(cache)
    counts = cache.worker.recorder.take()
    assert counts["store_failures"] == N_PAGES and "pages_saved" not in counts
    assert "No space left" in cache.store.counts.last_reason


def test_saving_asks_the_store_once_which_pages_it_has() -> None:
    questions: list[int] = []

    class Asked(MemoryStore):
        def has(self, key: str) -> bool:
            raise AssertionError("one page was asked for by itself: a round trip for each behind a network")

        def has_many(self, keys: Sequence[str]) -> list[bool]:
            questions.append(len(keys))
            return super().has_many(keys)

    cache = Cache(plan_of(FULL, FULL), Asked())
    cache.fill(N, FROM)
    save(cache)
    save(cache)
    assert questions == [N_PAGES, N_PAGES]
    assert cache.worker.recorder.take()["pages_saved"] == N_PAGES


def test_nan_in_the_cache_ends_no_thread() -> None:
    cache = Cache(plan_of(FULL, FULL))
    for view in cache.views.values():
        view.fill_(float("nan"))
    save(cache)
    cache.fill(N, FROM)
    save(cache)
    assert cache.worker.recorder.take()["pages_saved"] == N_PAGES


def windows(cache: Cache) -> list[SaveWindow]:
    return [SaveWindow(KEYS[-1], N, tuple(tuple(FROM) for _ in cache.plan.layout.groups))]


def test_sliding_layers_get_their_last_tokens_exactly() -> None:
    cache = Cache(plan_of(FULL, SLIDING))
    cache.fill(N, FROM)
    save(cache, windows(cache))
    assert load(cache) == Outcome({"a"})
    got, exact = cache.read(1, INTO), cache.vectors(1, N)
    for mine, theirs in zip(got, exact, strict=True):
        assert torch.equal(mine[:, N - WINDOW + 1 :], theirs[:, N - WINDOW + 1 :])
        assert not bool(mine[:, : N - WINDOW + 1].any())


@pytest.mark.parametrize("what", ["a page", "the last tokens", "damaged last tokens"])
def test_a_prefix_with_sliding_layers_is_restored_whole_or_not_at_all(what: str) -> None:
    cache = Cache(plan_of(FULL, SLIDING))
    cache.fill(N, FROM)
    save(cache, windows(cache))
    if what == "a page":
        cache.store.inner.remove(KEYS[1])
    elif what == "the last tokens":
        cache.store.inner.remove(window_key(KEYS[-1]))
    else:
        damage(cache.store.inner, window_key(KEYS[-1]))
    assert load(cache) == Outcome({"a"}, {"a"})
    assert not any(bool(view[INTO].any()) for view in cache.views.values())


@pytest.mark.parametrize("recipe", ["int8", "karhunen"])
def test_ranks_store_their_own_heads_and_together_the_whole_page(recipe: str) -> None:
    whole = saved(None, FULL, FULL, recipe=recipe)
    load(whole)
    for rank in (0, 1):
        shard = saved(None, FULL, FULL, recipe=recipe, rank=rank, ranks=2)
        assert [shard.store.has(f"{key}-{rank}of2") for key in KEYS] == [True] * N_PAGES
        assert load(shard) == Outcome({"a"})
        if recipe == "int8":  # karhunen decides by token lengths, of which a rank sees its own heads' share
            page = shard.store.inner.get(f"{KEYS[1]}-{rank}of2")
            assert page == cut_heads(whole.store.inner.get(KEYS[1]) or b"", rank, 2)
        for mine, theirs, exact in zip(shard.read(0, INTO), whole.read(0, INTO), whole.read(0, FROM), strict=True):
            own = slice(rank, rank + 1)
            assert float((mine - exact[own]).norm() / (theirs[own] - exact[own]).norm()) < 1.1


def test_a_rank_with_a_copy_of_anothers_heads_stores_nothing() -> None:
    copy = Cache(plan_of(FULL, FULL, rank=1, ranks=4))
    copy.fill(N, FROM)
    save(copy)
    assert copy.store.keys() == []
