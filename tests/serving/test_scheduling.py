"""The scheduler's half: what it offers is in the store, and what a step completes is saved once."""

import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import pytest
from tests.serving.stand_in import BLOCK, WINDOW, Request

from karhunen.serving.page_names import HeadShard, PageNames, window_key
from karhunen.serving.vllm.layout import EngineLayout, Group
from karhunen.serving.vllm.scheduling import SchedulerHalf
from karhunen.stores import Counted, MemoryStore

PAGE = 2 * BLOCK
NAMES = PageNames(b"owner", PAGE)
PLAIN = EngineLayout((Group((0, 1), BLOCK),), PAGE)
HYBRID = EngineLayout((Group((0,), BLOCK), Group((1,), BLOCK, WINDOW)), PAGE)
TABLE = list(range(100, 140))


def half(store: MemoryStore, layout: EngineLayout = PLAIN, seconds: float = 5.0, **settings: Any) -> SchedulerHalf:
    suffixes = settings.pop("suffixes", [""])
    return SchedulerHalf(layout, NAMES, Counted(store), suffixes, "", seconds, **settings)


def request(n_tokens: int, name: str = "a", **changes: Any) -> Request:
    tokens = list(range(n_tokens))
    return Request(name, tokens, prompt_token_ids=tokens, **changes)


def holding(n_pages: int, n_tokens: int = 1000, suffixes: tuple[str, ...] = ("",), salt: str = "") -> MemoryStore:
    store = MemoryStore()
    for key in NAMES.keys(list(range(n_tokens)), salt)[:n_pages]:
        for suffix in suffixes:
            store.put(key + suffix, b"page")
    return store


def answer(scheduler: SchedulerHalf, asked: Request, n_local: int = 0) -> tuple[int | None, bool]:
    """Asked until the lookup is done, as an engine does."""
    for _ in range(200):
        got = scheduler.matched(asked, n_local)
        if got[0] is not None:
            return got
        time.sleep(0.01)
    raise AssertionError("the lookup did not end")


def blocks_of(*tables: list[int]) -> Callable[[str], list[list[int]]]:
    return lambda _: list(tables or ([*TABLE],))


def test_the_longest_run_that_the_store_holds_is_offered() -> None:
    assert answer(half(holding(3)), request(10 * PAGE)) == (3 * PAGE, True)


def test_a_token_is_left_to_read() -> None:
    assert answer(half(holding(4)), request(4 * PAGE)) == (3 * PAGE, True)
    assert answer(half(holding(4)), request(4 * PAGE + 1)) == (4 * PAGE, True)


def test_as_many_tokens_are_left_as_have_to_be_exact() -> None:
    scheduler = half(holding(4), recent_tokens=PAGE + 1)
    assert answer(scheduler, request(4 * PAGE)) == (2 * PAGE, True)
    assert answer(scheduler, request(4 * PAGE + 1, "b")) == (3 * PAGE, True)
    assert scheduler.orders({"b": 4 * PAGE}, blocks_of()).computes
    assert scheduler.orders({"b": 4 * PAGE}, blocks_of()).saves == [], "it is all in the store"


@pytest.mark.parametrize("n_local", [3 * PAGE, 4 * PAGE])
def test_what_the_engine_has_itself_is_not_offered(n_local: int) -> None:
    assert answer(half(holding(3)), request(10 * PAGE), n_local) == (0, False)


def test_a_gap_ends_the_run() -> None:
    store = holding(5)
    store.remove(NAMES.keys(list(range(1000)))[2])
    assert answer(half(store), request(10 * PAGE)) == (2 * PAGE, True)


def test_a_page_that_one_rank_lacks_is_not_offered() -> None:
    suffixes = HeadShard(0, 2).all_suffixes
    store = holding(3, suffixes=tuple(suffixes))
    assert answer(half(store, suffixes=suffixes), request(10 * PAGE)) == (3 * PAGE, True)
    store.remove(NAMES.keys(list(range(1000)))[1] + suffixes[1])
    assert answer(half(store, suffixes=suffixes), request(10 * PAGE)) == (PAGE, True)


class Asked(MemoryStore):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[int] = []

    def has(self, key: str) -> bool:
        raise AssertionError("one page was asked for by itself: a round trip for each behind a network")

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        self.questions.append(len(keys))
        return super().has_many(keys)


@pytest.mark.parametrize("layout", [PLAIN, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("n_pages", [0, 3, 10])
def test_a_lookup_asks_the_store_once(layout: EngineLayout, n_ranks: int, n_pages: int) -> None:
    suffixes = HeadShard(0, n_ranks).all_suffixes
    store, asked = Asked(), request(10 * PAGE + 1)
    for key in NAMES.keys(asked.all_token_ids)[:n_pages]:
        for suffix in suffixes:
            store.put(key + suffix, b"page")
            store.put(window_key(key) + suffix, b"window")
    scheduler = half(store, layout, suffixes=suffixes)
    assert answer(scheduler, asked) == (n_pages * PAGE, n_pages > 0)
    assert store.questions == [(10 + 10 * layout.is_windowed) * n_ranks]
    assert scheduler.store.counts.failures == 0


def test_a_prompt_without_a_whole_page_is_not_asked_for() -> None:
    store = Asked()
    assert answer(half(store), request(PAGE - 1)) == (0, False)
    assert store.questions == []


def test_salted_requests_do_not_meet_others() -> None:
    assert answer(half(holding(3)), request(10 * PAGE, cache_salt="mine")) == (0, False)
    assert answer(half(holding(3, salt="mine")), request(10 * PAGE, cache_salt="mine")) == (3 * PAGE, True)


@pytest.mark.parametrize(
    "changes", [{"lora_request": 1}, {"mm_features": [1]}, {"prompt_embeds": 1}, {"pooling_params": 1}], ids=str
)
def test_requests_that_are_more_than_their_tokens_are_left_alone(changes: dict[str, Any]) -> None:
    scheduler, asked = half(holding(3)), request(10 * PAGE, **changes)
    assert scheduler.matched(asked, 0) == (0, False)
    assert scheduler.orders({"a": 10 * PAGE}, blocks_of()).saves == []


class Slow(MemoryStore):
    """Answers when it is let."""

    let = Event()

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        self.let.wait(10)
        return super().has_many(keys)


def test_a_slow_store_is_asked_again_and_then_holds_nothing() -> None:
    store = Slow()
    store.let = Event()
    scheduler, asked = half(store, seconds=0.2), request(10 * PAGE)
    assert scheduler.matched(asked, 0) == (None, False)
    assert answer(scheduler, asked) == (0, False)
    assert scheduler.recorder.take()["lookup_timeouts"] == 1
    store.let.set()


def test_a_store_that_fails_holds_nothing() -> None:
    class Broken(MemoryStore):
        def has_many(self, keys: Sequence[str]) -> list[bool]:
            raise ConnectionError("away")

    scheduler = half(Broken())
    assert answer(scheduler, request(10 * PAGE)) == (0, False)
    assert scheduler.store.counts.failures == 1


def test_a_load_names_pages_and_blocks() -> None:
    scheduler, asked = half(holding(4)), request(10 * PAGE)
    assert answer(scheduler, asked, n_local=PAGE + BLOCK)[0] == 3 * PAGE - BLOCK
    scheduler.allocated(asked, [TABLE[:8]], 3 * PAGE - BLOCK)
    orders = scheduler.orders({}, blocks_of())
    assert not orders.computes, "the engine only asks how loads are doing"
    (load,) = orders.loads
    assert (load.first_page, load.start, load.stop) == (1, PAGE + BLOCK, 4 * PAGE)
    assert load.keys == tuple(scheduler.names.keys(asked.all_token_ids)[1:4])
    assert load.blocks == (tuple(TABLE[:8]),)
    assert scheduler.orders({}, blocks_of()).loads == []


def test_a_request_whose_loads_fail_is_not_offered_a_third() -> None:
    scheduler, asked = half(holding(4)), request(10 * PAGE)
    for _ in range(2):
        assert answer(scheduler, asked) == (4 * PAGE, True)
        scheduler.allocated(asked, [TABLE[:8]], 4 * PAGE)
        scheduler.orders({}, blocks_of())
        scheduler.loaded({"a"}, {"a"}, set())
    assert answer(scheduler, asked) == (0, False)


def test_pages_are_saved_as_steps_complete_them() -> None:
    scheduler, asked = half(MemoryStore()), request(3 * PAGE + 5)
    answer(scheduler, asked)
    keys = scheduler.names.keys(asked.all_token_ids)
    per_page = PAGE // BLOCK
    saved: list[tuple[int, tuple[str, ...], tuple[int, ...]]] = []
    for n in (PAGE + 3, PAGE, PAGE + 2):
        saves = scheduler.orders({"a": n}, blocks_of()).saves
        saved += [(save.first_page, save.keys, save.blocks[0]) for save in saves]
        asked.num_computed_tokens += n
    run = [(i, (keys[i],), tuple(TABLE[i * per_page : (i + 1) * per_page])) for i in range(3)]
    assert saved == run


def test_answers_are_saved_too_once_their_tokens_are_known() -> None:
    scheduler, asked = half(MemoryStore()), request(PAGE - 2)
    answer(scheduler, asked)
    saves = []
    for step in range(4):
        n = PAGE - 2 if step == 0 else 1
        saves.append(len(scheduler.orders({"a": n}, blocks_of()).saves))
        asked.num_computed_tokens += n
        if step != 1:  # one step runs ahead of its token, as engines schedule
            asked.all_token_ids.append(7)
    assert saves == [0, 0, 0, 1]


def test_what_the_store_holds_is_not_saved() -> None:
    scheduler, asked = half(holding(2)), request(4 * PAGE)
    answer(scheduler, asked)
    (save,) = scheduler.orders({"a": 4 * PAGE}, blocks_of()).saves
    assert (save.first_page, len(save.keys)) == (2, 2)


def test_roles() -> None:
    asked = request(4 * PAGE + 1)
    producer = half(holding(2), loads=False)
    assert answer(producer, asked) == (0, False)
    assert len(producer.orders({"a": 4 * PAGE}, blocks_of()).saves) == 1
    consumer = half(holding(2), saves=False)
    assert answer(consumer, asked) == (2 * PAGE, True)
    assert consumer.orders({"a": 4 * PAGE}, blocks_of()).saves == []


def test_sliding_layers_make_a_hit_only_where_their_last_tokens_are_stored() -> None:
    store, asked = holding(5), request(10 * PAGE)
    keys = NAMES.keys(asked.all_token_ids)
    assert answer(half(store, HYBRID), asked) == (0, False)
    store.put(window_key(keys[2]), b"window")
    assert answer(half(store, HYBRID), asked) == (3 * PAGE, True)


def test_last_tokens_are_saved_at_the_prompts_last_page_and_where_others_parted() -> None:
    scheduler, asked = half(holding(2), HYBRID), request(4 * PAGE + 1)
    answer(scheduler, asked)
    ends = []
    for n in (PAGE + 1, 2 * PAGE, PAGE):
        orders = scheduler.orders({"a": n}, blocks_of(TABLE, TABLE))
        ends += [window.n_tokens // PAGE for window in orders.windows]
        asked.num_computed_tokens += n
        assert all(save.blocks[1] == () for save in orders.saves)
    assert ends == [2, 4]


def test_a_request_that_has_ended_is_forgotten() -> None:
    scheduler, asked = half(MemoryStore()), request(2 * PAGE)
    answer(scheduler, asked)
    scheduler.end("a")
    assert scheduler.orders({"a": 2 * PAGE}, blocks_of()).saves == []
