"""Coding rests beside an engine at work, and only then; loads are waited for while nothing is computed."""

import threading
import time

import pytest
import torch
from tests.serving.test_worker import INTO, KEYS, N_PAGES, N, load, saved

from karhunen.serving.vllm import pace as pace_of
from karhunen.serving.vllm.orders import Load, Orders
from karhunen.serving.vllm.pace import Pace


def test_coding_takes_its_share_beside_an_engine_at_work() -> None:
    slept: list[float] = []
    pace = Pace(0.25, slept.append)
    pace.rest(1.0, is_behind=False)
    assert not slept, "no step has been computed"
    pace.step()
    pace.rest(1.0, is_behind=False)
    assert slept == [3.0]
    pace.rest(1.0, is_behind=True)
    assert slept == [3.0], "too much waits"
    Pace(1.0, slept.append).rest(1.0, is_behind=False)
    assert slept == [3.0]


def test_an_engine_that_has_stopped_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    pace = Pace(0.5, slept.append)
    pace.step()
    now = time.monotonic()
    monkeypatch.setattr(pace_of.time, "monotonic", lambda: now + 1.1 * pace_of.BUSY_SECONDS)
    pace.rest(1.0, is_behind=False)
    assert not slept


def test_layers_coded_one_by_one_make_the_same_pages() -> None:
    cache = saved()
    pages = cache.plan.page_codec("")
    vectors = {layer: cache.vectors(layer, N) for layer in pages.layers}
    wanted = pages.encode_pages(vectors, torch.arange(N), N // N_PAGES)
    assert [cache.store.inner.get(key) for key in KEYS] == wanted


def test_a_step_that_computes_nothing_waits_for_a_load_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("karhunen.serving.vllm.worker.IDLE_SECONDS", 20.0)
    cache = saved()
    load(cache)  # the loader is there, and nothing runs
    assert not cache.worker.ended(Orders(computes=False)).finished
    let = threading.Event()
    get = cache.store.inner.get
    cache.store.inner.get = lambda key: (let.wait(10), get(key))[1]  # type: ignore[method-assign]
    cache.worker.start_loads(Orders(loads=[Load("a", KEYS, 0, 0, N, (tuple(INTO),))]))
    assert not cache.worker.ended(Orders(computes=True)).finished, "at once: others' tokens wait"
    threading.Timer(0.05, let.set).start()
    assert cache.worker.ended(Orders(computes=False)).finished == {"a"}
