"""The worker's half: copies finished blocks on the step and hands them to the saver; hands loads to the loader."""

import time
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from karhunen.serving.page_names import window_key
from karhunen.serving.vllm.layout import Group
from karhunen.serving.vllm.loading import Loader, Outcome
from karhunen.serving.vllm.orders import Orders, SaveWindow
from karhunen.serving.vllm.pace import Pace
from karhunen.serving.vllm.paged import PagedLayer
from karhunen.serving.vllm.saving import Copied, Saver, copies
from karhunen.serving.vllm.shared import Shared
from karhunen.serving.vllm.startup import Plan
from karhunen.serving.vllm.stats import Recorder
from karhunen.serving.vllm.window import WindowPages
from karhunen.stores import Counted

SECONDS_TO_FINISH = 30.0
IDLE_SECONDS = 0.01
"""What a request that arrives beside a load waits at most for its first step."""


@final
class WorkerHalf:
    """Of one rank. `attention` are the engine's layer objects and `views` its cache, both by the engine's names."""

    def __init__(self, plan: Plan, store: Counted, attention: Mapping[str, Any], views: Mapping[str, Tensor]) -> None:
        self.plan, self.store = plan, store
        self.recorder = Recorder()
        self.layers: dict[int, PagedLayer] = {}
        for index, name in plan.names_of_layers.items():
            shape = plan.codec.model.layers[index]
            block = plan.layout.groups[plan.layout.group_of[index]].block_tokens
            self.layers[index] = PagedLayer(attention[name], views[name], block, shape.key_dim, shape.value_dim)
        self._pace = Pace(plan.settings.coding_share)
        self._saver: Saver | None = None
        self._loader: Loader | None = None

    def start_loads(self, orders: Orders) -> None:
        """Before, or after, the step's forward: the blocks are nobody's yet."""
        for load in orders.loads:
            self._loader_of(orders).put(load)

    def save(self, orders: Orders) -> None:
        """After the step's forward: the blocks hold its tokens now and may be given away before the next."""
        if orders.computes:
            self._pace.step()
        if not (orders.saves or orders.windows) or not self.plan.shard.writes:
            return
        start = time.perf_counter()
        saver = self._saver_of(orders)
        with torch.inference_mode():
            for save in orders.saves:
                if not saver.has_room(self._n_bytes(save.blocks)):
                    self.recorder.add("pages_dropped", len(save.keys))
                    continue
                copied = copies(self.layers, self.plan.layout, save.blocks)
                saver.put(Copied(save.keys, save.first_page, copied))
            for window in orders.windows:
                self._save_window(saver, window)
        self.recorder.time("snapshot_seconds", time.perf_counter() - start)

    def ended(self, orders: Orders) -> Outcome:
        """Loads that have ended since the last step. The engine asks without a pause while it has nothing to compute,
        and would keep the interpreter from the threads that load: then the answer waits a little for one to end."""
        return Outcome() if self._loader is None else self._loader.take(0.0 if orders.computes else IDLE_SECONDS)

    def wait(self, seconds: float | None = None) -> bool:
        """Until all that was copied is stored."""
        return self._saver is None or self._saver.wait(seconds)

    def close(self) -> None:
        """Let what is copied be stored, at most for `SECONDS_TO_FINISH`."""
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close(SECONDS_TO_FINISH)

    def _save_window(self, saver: Saver, window: SaveWindow) -> None:
        blocks: list[tuple[int, ...]] = []
        starts: dict[int, int] = {}
        for group, ids in zip(self.plan.layout.groups, window.blocks, strict=True):
            own = self._window_blocks(group, ids, window.n_tokens)
            blocks.append(own[1])
            starts |= dict.fromkeys(group.layers, own[0])
        if saver.has_room(self._n_bytes(blocks)):
            copied = copies(self.layers, self.plan.layout, blocks)
            saver.put(Copied((window_key(window.key),), -1, copied, window.n_tokens, starts))
        else:
            self.recorder.add("pages_dropped")

    def _window_blocks(self, group: Group, ids: tuple[int, ...], n_tokens: int) -> tuple[int, tuple[int, ...]]:
        """(first token, blocks) that hold a group's last tokens."""
        if group.window is None:
            return 0, ()
        wanted = self.plan.layout.window_tokens(group, n_tokens)
        first = wanted.start // group.block_tokens
        return first * group.block_tokens, ids[first : -(-wanted.stop // group.block_tokens)]

    def _n_bytes(self, blocks: Any) -> int:
        total = 0
        for group, ids in zip(self.plan.layout.groups, blocks, strict=True):
            for layer in group.layers if ids else ():
                view = self.layers[layer].view
                total += len(ids) * group.block_tokens * view.shape[1] * view.shape[3] * view.dtype.itemsize
        return total

    def _shared(self, orders: Orders) -> Shared:
        pages = self.plan.page_codec(orders.weights)
        shapes = self.plan.codec.model.layers
        dims = {i: (shapes[i].key_dim, shapes[i].value_dim) for i in self.layers}
        return Shared(
            pages, WindowPages(pages, dims), self.layers, self.plan.layout, self.store, self.plan.shard.suffix,
            self.recorder,
        )  # fmt: skip

    def _saver_of(self, orders: Orders) -> Saver:
        if self._saver is None:
            settings = self.plan.settings
            self._saver = Saver(self._shared(orders), settings.max_queued_bytes, self._pace, settings.accuracy_every)
        return self._saver

    def _loader_of(self, orders: Orders) -> Loader:
        if self._loader is None:
            self._loader = Loader(self._shared(orders), self.plan.settings.loads_at_a_time)
        return self._loader
