"""Sampled pages: which are compared, with what, and that none is where nobody asked."""

from typing import Any

import pytest
from tests.serving.stand_in import BLOCK, FULL, Cache, plan_of

from karhunen.monitoring.attention_accuracy import attention_accuracy_delta, standing_in
from karhunen.pages import PageCodec
from karhunen.serving.vllm.accuracy import page_delta
from karhunen.serving.vllm.orders import Orders, Save

N_PAGES = 5
KEYS = tuple(f"{i:032x}" for i in range(N_PAGES))
BLOCKS = [5, 9, 2, 11, 20]


def saved(recipe: str = "int4", **settings: Any) -> Cache:
    cache = Cache(plan_of(FULL, FULL, recipe=recipe, **settings))
    cache.fill(N_PAGES * BLOCK, BLOCKS)
    cache.worker.save(Orders(saves=[Save(KEYS, 0, (tuple(BLOCKS),))]))
    assert cache.worker.wait(30)
    cache.worker.close()
    return cache


def expected(cache: Cache, page: int) -> float:
    """Of a page in the store, from the definition."""
    decoded = cache.plan.page_codec("").decode(cache.store.inner.get(KEYS[page]) or b"")
    squares = 0.0
    for layer, pair in decoded.items():
        exact = tuple(x[:, page * BLOCK : (page + 1) * BLOCK] for x in cache.read(layer, BLOCKS))
        queries, n_seen = standing_in(exact[0])
        squares += attention_accuracy_delta(queries, n_seen, (exact[0], exact[1]), pair) ** 2
    return (squares / len(decoded)) ** 0.5


def test_every_second_page_is_compared_with_the_vectors_it_came_from() -> None:
    cache = saved(accuracy_every=2)
    found = cache.worker.recorder.take()
    assert found["attention_accuracy_delta"] == pytest.approx([expected(cache, 1), expected(cache, 3)], rel=1e-5)
    assert len(found["accuracy_seconds"]) == 2
    assert 0.01 < found["attention_accuracy_delta"][0] < 1


def test_finer_codes_move_attention_less() -> None:
    coarse, fine = (
        saved(recipe, accuracy_every=1).worker.recorder.take()["attention_accuracy_delta"]
        for recipe in ("int4", "int8")
    )
    assert all(4 * b < a for a, b in zip(coarse, fine, strict=True))


def test_nothing_is_decoded_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageCodec, "decode_layers", None)
    found = saved().worker.recorder.take()
    assert found["pages_saved"] == N_PAGES and not {"attention_accuracy_delta", "accuracy_seconds"} & found.keys()


def test_a_comparison_that_fails_costs_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageCodec, "decode_layers", None)
    cache = saved(accuracy_every=1)
    found = cache.worker.recorder.take()
    assert found["pages_saved"] == N_PAGES and "attention_accuracy_delta" not in found
    assert cache.store.counts.failures == 0


def test_a_page_that_holds_nothing_coded_is_not_compared() -> None:
    pages = plan_of(FULL, recipe="full").page_codec("")
    with pytest.raises(ValueError, match="no layer of this page is coded"):
        page_delta(pages, b"", {0: Cache(plan_of(FULL, recipe="full")).vectors(0, BLOCK)})
