"""Coding beside the engine: blocks are copied on the step, a thread codes the copies and puts them into the store.

step ─▶ copies ─▶ queue (bounded in bytes) ─▶ thread: vectors ─▶ pages ─▶ store

What does not fit the queue is not stored, and counted: a request is never kept waiting for its pages to be written.
Layers are coded one by one with a rest behind each (pace.py), none while more than half of the queue is full.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import final

import torch
from torch import Tensor

from karhunen.device import HOST
from karhunen.pages.cut import join_layers
from karhunen.pages.plan import KeysValues
from karhunen.serving.own_exact import own_exact
from karhunen.serving.vllm.accuracy import AccuracySampler
from karhunen.serving.vllm.layout import EngineLayout
from karhunen.serving.vllm.pace import Pace
from karhunen.serving.vllm.paged import PagedLayer
from karhunen.serving.vllm.shared import Shared

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Copied:
    """Copies of blocks, by layer: of pages `first_page` … with these keys, or (`n_tokens` set) of the last tokens of
    sliding layers after so many, whose own first token is that of `starts`."""

    keys: tuple[str, ...]
    first_page: int
    layers: dict[int, Tensor]
    n_tokens: int | None = None
    starts: dict[int, int] | None = None

    @property
    def n_bytes(self) -> int:
        """Of all copies."""
        return sum(copy.nbytes for copy in self.layers.values())


@final
class Saver:
    """Codes what it is given, one after the other, in a thread of its own. `close` lets it finish."""

    def __init__(self, shared: Shared, max_queued_bytes: int, pace: Pace, accuracy_every: int = 0) -> None:
        self.shared = shared
        self.pace = pace
        self.sampler = AccuracySampler(shared.pages, shared.recorder, accuracy_every)
        self.max_queued_bytes = max_queued_bytes
        self._queue: SimpleQueue[Copied | None] = SimpleQueue()
        self._queued_bytes = 0
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="karhunen-save", daemon=True)
        self._thread.start()

    def has_room(self, n_bytes: int) -> bool:
        """Whether so much more may wait; one that is larger than the queue may wait alone."""
        with self._changed:
            return not self._queued_bytes or self._queued_bytes + n_bytes <= self.max_queued_bytes

    def put(self, copied: Copied) -> None:
        """To be coded and stored."""
        with self._changed:
            self._queued_bytes += copied.n_bytes
        self._queue.put(copied)

    def wait(self, seconds: float | None = None) -> bool:
        """Until nothing waits to be stored; false if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued_bytes, seconds)

    def close(self, seconds: float) -> None:
        """Let what waits be stored, at most for so long."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: the engine's keep theirs
        while (copied := self._queue.get()) is not None:
            start = time.perf_counter()
            try:
                with torch.inference_mode():  # the engine's tensors were made in it
                    self._save(copied)
            except Exception as error:  # noqa: BLE001  # a page that is not stored must not end the engine
                self.shared.store.failed(f"{type(error).__name__}: {error}")
                _LOG.warning("pages %d … were not stored: %s: %s", copied.first_page, type(error).__name__, error)
            n_bytes = copied.n_bytes
            del copied
            self.shared.recorder.time("encode_seconds", time.perf_counter() - start)
            self.sampler.compare()
            with self._changed:
                self._queued_bytes -= n_bytes
                self._changed.notify_all()

    def _save(self, copied: Copied) -> None:
        keys = [key + self.shared.suffix for key in copied.keys]
        missing = [i for i, is_there in enumerate(self.shared.store.has_many(keys)) if not is_there]
        if not missing:
            return
        if copied.n_tokens is not None:
            self._keep(keys[0], self._window(copied), 0)
            return
        run = range(missing[0], missing[-1] + 1)
        vectors = {layer: self._read(layer, copy, len(keys), run) for layer, copy in copied.layers.items()}
        size = self.shared.layout.page_tokens
        positions = torch.arange(
            (copied.first_page + run.start) * size, (copied.first_page + run.stop) * size, device=HOST
        )
        made = self._encode(vectors, positions)
        dense = sum(key.nbytes + value.nbytes for key, value in vectors.values()) // len(run)
        for i in missing:
            self._keep(keys[i], made[i - run.start], dense)
            self.sampler.coded(made[i - run.start], vectors, (i - run.start) * size)

    def _encode(self, vectors: Mapping[int, KeysValues], positions: Tensor) -> list[bytes]:
        """As `encode_pages` of all layers, with rests."""
        size = self.shared.layout.page_tokens
        exact = own_exact(self.shared.pages, vectors, size)
        by_layer: list[list[bytes]] = []
        for layer, given in vectors.items():
            start = time.perf_counter()
            by_layer.append(self.shared.pages.encode_pages({layer: given}, positions, size, exact))
            self.pace.rest(time.perf_counter() - start, self._is_behind())
        return [join_layers(pages) for pages in zip(*by_layer, strict=True)]

    def _is_behind(self) -> bool:
        with self._changed:
            return self._queued_bytes > self.max_queued_bytes // 2

    def _keep(self, key: str, data: bytes, dense_bytes: int) -> None:
        if self.shared.store.kept(key, data):
            self.shared.recorder.add("bytes_stored", len(data))
            if dense_bytes:
                self.shared.recorder.add("pages_saved")
                self.shared.recorder.add("bytes_saved", dense_bytes - len(data))
        else:
            self.shared.recorder.add("store_failures")

    def _read(self, layer: int, copy: Tensor, n_pages: int, run: range) -> KeysValues:
        per_page = copy.shape[0] // n_pages
        keys, values = self.shared.layers[layer].read(copy[run.start * per_page : run.stop * per_page])
        return keys.cpu(), values.cpu()

    def _window(self, copied: Copied) -> bytes:
        assert copied.n_tokens is not None and copied.starts is not None, "a window says which tokens it holds"
        layers: dict[int, KeysValues] = {}
        for layer, copy in copied.layers.items():
            group = self.shared.layout.groups[self.shared.layout.group_of[layer]]
            wanted = self.shared.layout.window_tokens(group, copied.n_tokens)
            run = slice(wanted.start - copied.starts[layer], wanted.stop - copied.starts[layer])
            keys, values = self.shared.layers[layer].read(copy)
            layers[layer] = (keys[:, run].cpu(), values[:, run].cpu())
        return self.shared.windows.write(layers, copied.n_tokens)


def copies(
    layers: Mapping[int, PagedLayer], layout: EngineLayout, blocks: Sequence[Sequence[int]]
) -> dict[int, Tensor]:
    """Of the given blocks of each group, for its layers; groups without blocks have none."""
    found: dict[int, Tensor] = {}
    for group, ids in zip(layout.groups, blocks, strict=True):
        if ids:
            table = torch.tensor(list(ids), dtype=torch.int64, device=HOST)
            found.update({layer: layers[layer].snapshot(table) for layer in group.layers})
    return found
