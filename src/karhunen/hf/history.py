"""Keys and values of all tokens so far, as tensors whose numbers exist only if someone asks for them.

    cache layer ─▶ HistoryTensor (shape, dtype, a snapshot) ─▶ karhunen's attention: reads the snapshot's bytes
                                                            ─▶ any other operation: decodes, and says so

So every model works: one that hands cached keys to attention as they are is read from bytes, one that computes with
them first (latent attention) gets the decoded ones.
"""

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from karhunen.attention.fused import OverCoded
from karhunen.attention.reader import Reader
from karhunen.statistics.need import Slot
from karhunen.store.snapshot import Snapshot
from karhunen.windows.score import Queries

OnQuery = Callable[[Tensor, float], None]
COMPUTED_WITH = "the model computes with its cached keys or values before attention"


Attended = Callable[[Queries, Tensor | None, Tensor | None], None]
"""Told which queries have read a layer: under which mask over all tokens, and the logarithm of what their softmax was
divided by, where that is known."""


@final
class History:
    """One layer at one step. `on_read(how)` learns how it was read, `on_dense(bytes)` what decoding took, `on_attended`
    by which queries, if the layer waits for that; what a mask says of the coded tokens is kept in `masks` for the
    layers of one forward, which share it. `on_query` is shown the queries and the softmax's scale, where somebody
    looks."""

    def __init__(
        self,
        reader: Reader,
        snapshot: Snapshot,
        on_read: Callable[[str], None],
        on_dense: Callable[[int], None],
        masks: "Masks | None" = None,
        on_attended: "Attended | None" = None,
        on_query: "OnQuery | None" = None,
    ) -> None:
        self.reader = reader
        self.snapshot = snapshot
        self.on_read = on_read
        self.on_dense = on_dense
        self.masks = masks
        self.on_attended = on_attended
        self.on_query = on_query

    def over_coded(self, mask: Tensor | None) -> OverCoded:
        """What `mask` says of this layer's coded tokens."""
        return OverCoded.of(self.snapshot, mask) if self.masks is None else self.masks.over_coded(self.snapshot, mask)

    def dense(self, slot: Slot, dtype: torch.dtype, reason: str) -> Tensor:
        """Decoded, for the reason given."""
        self.on_read(f"decoded ({reason})")
        made = self.snapshot.dense(self.reader.codec, slot).to(dtype)
        self.on_dense(2 * made.nbytes)
        return made


@final
class Masks:
    """What the masks of one forward say of coded tokens: layers that hold alike are given one mask, which is looked at
    once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], tuple[weakref.ref[Tensor], OverCoded]] = {}

    def clear(self) -> None:
        """Another forward begins."""
        self._found.clear()

    def over_coded(self, held: Snapshot, mask: Tensor | None) -> OverCoded:
        """As `OverCoded.of`."""
        if mask is None:
            return OverCoded()
        asked = id(mask), held.n_sink, held.n_coded
        kept = self._found.get(asked)
        if kept is None or kept[0]() is not mask:
            kept = self._found[asked] = weakref.ref(mask), OverCoded.of(held, mask)
        return kept[1]


@final
class HistoryTensor(Tensor):
    """One side of a history in the dtype the model computes in; holds no numbers."""

    history: History
    slot: Slot

    __torch_function__: Any = getattr(torch, "_C")._disabled_torch_function_impl  # noqa: B009

    @staticmethod
    def __new__(cls: "type[HistoryTensor]", history: History, slot: Slot, dtype: torch.dtype) -> "HistoryTensor":
        """Of the shape that the decoded tokens would have."""
        held = history.snapshot
        b, h, _, d = held.recent[slot].shape
        shape = (b, h, held.n_held, d)
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage]
            cls, shape, dtype=dtype, device=held.recent[slot].device
        )
        made.history, made.slot = history, slot
        return made

    def dense(self, reason: str) -> Tensor:
        """The numbers."""
        return self.history.dense(self.slot, self.dtype, reason)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"HistoryTensor({self.slot}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride, reportMissingParameterType, reportUnknownParameterType]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any operation sees the numbers."""

        def numbers(x: Any) -> Any:
            return x.dense(COMPUTED_WITH) if isinstance(x, HistoryTensor) else x

        return func(*pytree.tree_map(numbers, args), **pytree.tree_map(numbers, kwargs or {}))
