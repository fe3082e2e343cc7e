"""Loading beside the engine: threads read and decode pages and write them into blocks that nobody reads yet.

Load ─▶ store ─▶ pages checked ─▶ a layer at a time: decode ─▶ the request's blocks ─▶ reported with the next step

The first page that is missing, damaged or not ours ends a load: its blocks and those behind it are reported, and the
engine reads these tokens itself. Where layers have windows a prefix is restored whole or not at all.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from typing import final

import torch

from karhunen.serving.page_names import window_key
from karhunen.serving.vllm.orders import Load
from karhunen.serving.vllm.shared import Shared

_LOG = logging.getLogger(__name__)


@final
@dataclass
class Outcome:
    """What the engine is told: requests whose load has ended, those of them that restored nothing, and blocks that do
    not hold what they should."""

    finished: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    invalid_blocks: set[int] = field(default_factory=set[int])


@final
class Loader:
    """Carries out loads, a few requests at a time."""

    def __init__(self, shared: Shared, loads_at_a_time: int) -> None:
        self.shared = shared
        self._pool = ThreadPoolExecutor(loads_at_a_time, thread_name_prefix="karhunen-load")
        self._changed = Condition()
        self._running = 0
        self._outcome = Outcome()

    def put(self, load: Load) -> None:
        """To be carried out."""
        with self._changed:
            self._running += 1
        self._pool.submit(self._run, load)

    def take(self, seconds: float = 0.0) -> Outcome:
        """What has ended since the last call; while loads run and none has ended, wait so long for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome.finished or not self._running, seconds)
            outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def close(self) -> None:
        """Loads that have not begun are dropped: nobody waits for them any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, load: Load) -> None:
        torch.set_num_threads(1)
        start, n_good = time.perf_counter(), 0
        try:
            with torch.inference_mode():
                n_good = self._load(load)
        except Exception as error:  # noqa: BLE001  # the engine waits for this request and must hear of it
            self.shared.store.failed(f"{type(error).__name__}: {error}")
            _LOG.warning("a prefix was not loaded: %s: %s", type(error).__name__, error)
        self.shared.recorder.time("decode_seconds", time.perf_counter() - start)
        self.shared.recorder.add("pages_loaded", n_good)
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
            self._outcome.finished.add(load.request)
            if n_good < len(load.keys):
                self.shared.recorder.add("load_failures")
                if len(self.shared.layout.groups) > 1:
                    self._outcome.failed.add(load.request)
                else:
                    self._outcome.invalid_blocks |= self._blocks_from(load, n_good)

    def _blocks_from(self, load: Load, page: int) -> set[int]:
        tokens = max(load.start, (load.first_page + page) * self.shared.layout.page_tokens)
        return set(load.blocks[0][tokens // self.shared.layout.groups[0].block_tokens :])

    def _load(self, load: Load) -> int:
        """How many pages are in their blocks now."""
        found = self._pages(load)
        window = None
        if self.shared.layout.is_windowed and len(found) == len(load.keys):
            window = self._window(load)
        if not found or (self.shared.layout.is_windowed and window is None):
            return 0
        first = load.first_page * self.shared.layout.page_tokens
        skip = load.start - first  # of the first page the engine may have some tokens itself
        for layer, (keys, values) in self.shared.pages.decode_layers(found):
            table = load.blocks[self.shared.layout.group_of[layer]]
            self.shared.layers[layer].write(keys[:, skip:], values[:, skip:], load.start, table)
        for layer, (keys, values) in (window or {}).items():
            group = self.shared.layout.group_of[layer]
            wanted = self.shared.layout.window_tokens(self.shared.layout.groups[group], load.stop)
            own = max(0, load.start - wanted.start)
            self.shared.layers[layer].write(keys[:, own:], values[:, own:], wanted.start + own, load.blocks[group])
        return len(found)

    def _pages(self, load: Load) -> list[bytes]:
        """As many as are there, whole, and what they should be."""
        found: list[bytes] = []
        size = self.shared.layout.page_tokens
        for i, key in enumerate(load.keys, start=load.first_page):
            data = self.shared.store.get(key + self.shared.suffix)
            if data is None:
                break
            try:
                frame = self.shared.pages.open(data)
                if (frame.first_token, frame.n_tokens) != (i * size, size):
                    raise ValueError(f"tokens from {frame.first_token} on, not those of page {i}")
                if len(frame.sections) != len(self.shared.pages.layers):
                    raise ValueError(f"a page of {len(frame.sections)} layers, not of {len(self.shared.pages.layers)}")
            except ValueError as error:
                self._refuse(key + self.shared.suffix, error)
                break
            self.shared.recorder.add("bytes_loaded", len(data))
            found.append(data)
        return found

    def _window(self, load: Load) -> dict[int, tuple[torch.Tensor, torch.Tensor]] | None:
        key = window_key(load.keys[-1]) + self.shared.suffix
        data = self.shared.store.get(key)
        if data is None:
            return None
        lengths = {
            layer: len(self.shared.layout.window_tokens(group, load.stop))
            for group in self.shared.layout.groups
            if group.window is not None
            for layer in group.layers
        }
        try:
            window = self.shared.windows.read(data, load.stop, lengths)
        except ValueError as error:
            self._refuse(key, error)
            return None
        self.shared.recorder.add("bytes_loaded", len(data))
        return window

    def _refuse(self, key: str, error: ValueError) -> None:
        self.shared.store.refuse(key, str(error))
        self.shared.recorder.add("refusals")
        _LOG.warning("page %s was refused: %s", key, error)
