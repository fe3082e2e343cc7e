"""The scheduler's half: which prefix of a request the store holds, and which pages a step completes.

new request ─▶ keys ─▶ lookup (a thread) ─▶ so many tokens can be loaded ─▶ Load, once blocks are allocated
step        ─▶ pages that its tokens complete and the store does not hold ─▶ Save

A lookup runs beside the engine and asks the store once, for all pages; until it is done the engine is told to ask
again. What is offered is what the store says it has for every rank. What cannot be loaded after all, the worker's half
reports and the engine reads itself; such a request is not offered anything a third time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, final

from karhunen.serving.page_names import PageNames, window_key
from karhunen.serving.vllm.layout import EngineLayout
from karhunen.serving.vllm.orders import Load, Orders, Save, SaveWindow
from karhunen.serving.vllm.stats import Recorder
from karhunen.stores import Counted

LOADS_OF_A_REQUEST = 2
LOOKUPS_AT_A_TIME = 4

BlocksOf = Callable[[str], Sequence[Sequence[int]] | None]


@final
@dataclass(frozen=True)
class Found:
    """Of a prompt: pages there without a gap from the first on, and how many of them can be restored."""

    n_present: int = 0
    n_restorable: int = 0


@final
@dataclass
class Tracked:
    """A request from its arrival to its end. `usable`: pages of its prompt that leave a token to read; `restorable`:
    those that leave as many as have to be exact."""

    request: Any
    keys: list[str]
    usable: int
    restorable: int
    found: "Future[Found]"
    since: float
    saved: int = 0
    loads_left: int = LOADS_OF_A_REQUEST
    is_loading: bool = False
    windows: set[int] = field(default_factory=set[int])
    """Ends of pages, in pages, where the sliding layers' last tokens are yet to be stored."""


@final
class SchedulerHalf:
    """Lives in the engine's scheduler; `saves` and `loads` say which way pages go."""

    def __init__(
        self, layout: EngineLayout, names: PageNames, store: Counted, suffixes: Sequence[str], weights: str,
        lookup_seconds: float, recent_tokens: int = 0, saves: bool = True, loads: bool = True,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.names = names
        self.store = store
        self.suffixes = list(suffixes)
        self.weights = weights
        self.lookup_seconds = lookup_seconds
        self.recent_tokens = recent_tokens
        self.saves, self.loads = saves, loads
        self.recorder = Recorder()
        self._tracked: dict[str, Tracked] = {}
        self._pending: list[Load] = []
        self._pool = ThreadPoolExecutor(LOOKUPS_AT_A_TIME, thread_name_prefix="karhunen-lookup")

    def add(self, request: Any) -> None:
        """A request that has arrived; one whose cache depends on more than its tokens is left alone."""
        if not can_be_shared(request) or request.request_id in self._tracked:
            return
        tokens = list(request.all_token_ids)
        keys = self.names.keys(tokens, request.cache_salt or "")
        usable = min(len(keys), max(0, len(tokens) - 1) // self.names.page_tokens)
        restorable = min(usable, max(0, len(tokens) - max(1, self.recent_tokens)) // self.names.page_tokens)
        found = self._pool.submit(self._look_up, keys, usable, restorable)
        self._tracked[request.request_id] = Tracked(request, keys, usable, restorable, found, time.perf_counter())

    def matched(self, request: Any, n_local: int) -> tuple[int | None, bool]:
        """(tokens beyond `n_local` that can be loaded, beside the engine's steps); (None, …): ask again."""
        self.add(request)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        found = self._found(tracked)
        if found is None:
            return None, False
        if not self.loads or not tracked.loads_left:
            return 0, False
        n_tokens = found.n_restorable * self.names.page_tokens - n_local
        return (n_tokens, True) if n_tokens > 0 else (0, False)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], n_external: int) -> None:
        """Blocks for `n_external` tokens are there: load into them with the next orders."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not n_external:
            return
        found = self._found(tracked) or Found()
        stop = found.n_restorable * self.names.page_tokens
        first = (stop - n_external) // self.names.page_tokens
        tracked.loads_left -= 1
        tracked.is_loading = True
        keys = tuple(tracked.keys[first : found.n_restorable])
        own = tuple(tuple(ids) for ids in blocks)
        self._pending.append(Load(request.request_id, keys, first, stop - n_external, stop, own))

    def orders(self, scheduled: Mapping[str, int], blocks_of: BlocksOf) -> Orders:
        """Of the step that computes so many tokens of each request."""
        orders = Orders(self.weights, self._pending, computes=any(scheduled.values()))
        self._pending = []
        if self.saves:
            for name, n_tokens in scheduled.items():
                if (tracked := self._tracked.get(name)) is not None:
                    self._plan(orders, tracked, n_tokens, blocks_of)
        return orders

    def loaded(self, finished: set[str], failed: set[str], invalid: set[int]) -> None:
        """What the worker's half says of loads."""
        for name in finished | failed:
            if (tracked := self._tracked.get(name)) is not None:
                tracked.is_loading = False
        if failed or invalid:  # what the store said is not so: ask it again before a request is offered anything
            for tracked in self._tracked.values():
                if not tracked.is_loading and tracked.request.num_computed_tokens == 0:
                    tracked.found = self._pool.submit(self._look_up, tracked.keys, tracked.usable, tracked.restorable)
                    tracked.since = time.perf_counter()

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._tracked.pop(request_id, None)

    def close(self) -> None:
        """Lookups that run end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _found(self, tracked: Tracked) -> Found | None:
        """What the lookup found, nothing if it took too long, None while it runs."""
        if tracked.found.done():
            return tracked.found.result()
        if time.perf_counter() - tracked.since < self.lookup_seconds:
            return None
        self.recorder.add("lookup_timeouts")
        tracked.found = Future()
        tracked.found.set_result(Found())
        return Found()

    def _look_up(self, keys: Sequence[str], usable: int, restorable: int) -> Found:
        start = time.perf_counter()
        own = list(keys[:usable])
        ends = [window_key(key) for key in own[:restorable]] if self.layout.is_windowed else []
        there = self._have([*own, *ends])
        n_present = there.index(False) if False in there[:usable] else usable
        n_restorable = min(n_present, restorable)
        while ends and n_restorable and not there[usable + n_restorable - 1]:
            n_restorable -= 1
        self.recorder.add("pages_found", n_restorable)
        self.recorder.add("pages_missed", restorable - n_restorable)
        self.recorder.time("lookup_seconds", time.perf_counter() - start)
        return Found(n_present, n_restorable)

    def _have(self, keys: Sequence[str]) -> list[bool]:
        """Whether every rank's part of each is there; the store is asked once for all."""
        if not keys:
            return []
        n = len(self.suffixes)
        there = self.store.has_many([key + suffix for key in keys for suffix in self.suffixes])
        return [all(there[i : i + n]) for i in range(0, len(there), n)]

    def _plan(self, orders: Orders, tracked: Tracked, n_tokens: int, blocks_of: BlocksOf) -> None:
        request, page = tracked.request, self.names.page_tokens
        before: int = request.num_computed_tokens
        known = len(request.all_token_ids)  # tokens that are sampled and not yet told are not known
        done = min(before + n_tokens, known) // page
        found = self._found(tracked) or Found()
        tracked.saved = max(tracked.saved, found.n_present)
        if done > len(tracked.keys):
            tracked.keys = self.names.keys(list(request.all_token_ids), request.cache_salt or "", tracked.keys)
        blocks = None
        if done > tracked.saved and (blocks := blocks_of(request.request_id)) is not None:
            run = slice(tracked.saved, done)
            orders.saves.append(Save(tuple(tracked.keys[run]), run.start, self.layout.blocks_of_pages(blocks, run)))
            tracked.saved = done
        if self.layout.is_windowed:
            self._plan_windows(orders, tracked, found, range(before, before + n_tokens), blocks_of)

    def _plan_windows(
        self, orders: Orders, tracked: Tracked, found: Found, computed: range, blocks_of: BlocksOf
    ) -> None:
        """At the last page of the prompt, at the last that may be restored, and where others' prompts have parted."""
        page, name = self.names.page_tokens, tracked.request.request_id
        for end in {tracked.usable, tracked.restorable, found.n_present} - tracked.windows - {0, found.n_restorable}:
            if computed.start <= end * page <= computed.stop and (blocks := blocks_of(name)) is not None:
                tracked.windows.add(end)
                own = tuple(tuple(ids) for ids in blocks)
                orders.windows.append(SaveWindow(tracked.keys[end - 1], end * page, own))


def can_be_shared(request: Any) -> bool:
    """Whether a request's cache is that of its tokens alone: no adapter, images or embeddings."""
    return (
        getattr(request, "lora_request", None) is None
        and not getattr(request, "mm_features", None)
        and getattr(request, "prompt_embeds", None) is None
        and getattr(request, "prompt_token_ids", None) is not None
        and getattr(request, "pooling_params", None) is None
    )
