"""Shows the layers of a compressed cache the queries that read it, where its window chooses tokens by them.

    forward with the cache ─▶ attention called under a private name ─▶ layer.attended(queries, key) ─▶ the model's own

The private name stands only while such a forward runs, and only if some layer still waits for queries: a window that
decides once routes the prompt's forward and no other. Afterwards the model is as it was, also after an error.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, cast, final, runtime_checkable

from torch import Tensor, nn
from transformers.cache_utils import Cache

from karhunen.hf.capture import Attention, routed_attention
from karhunen.hf.probe import untraced
from karhunen.store.layer_store import LayerStore
from karhunen.windows.score import Queries


@runtime_checkable
class Reader(Protocol):
    """A cache layer that looks at queries."""

    store: LayerStore

    @property
    def reads_queries(self) -> bool:
        """Whether it waits for those of the running forward."""
        ...

    def attended(self, queries: Queries, key: Tensor) -> None:
        """The newest tokens' queries have read `key`."""
        ...


def show_queries(model: nn.Module, cache: "weakref.ref[Any]") -> ExitStack:
    """Show the forwards of `model` that use `cache` to its layers, until the stack is closed.

    ValueError if the model's attention does not go through transformers' interface.
    """
    with routed_attention(model, lambda attention, key, value, plain: plain()):
        pass  # refuses a model that cannot be routed here rather than inside the first forward
    running = ExitStack()

    @untraced
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held = cache()
        if held is None or not any(value is held for value in (*args, *kwargs.values())):
            return
        waiting = _waiting(held)
        if waiting:
            running.enter_context(routed_attention(model, _Shown(waiting).attend))

    @untraced
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.close()

    inner = cast("nn.Module", getattr(model, "base_model", model))
    stack = ExitStack()
    stack.callback(running.close)
    stack.callback(inner.register_forward_pre_hook(enter, with_kwargs=True).remove)
    stack.callback(inner.register_forward_hook(leave, always_call=True).remove)
    return stack


def _waiting(cache: Cache) -> dict[int, Reader]:
    return {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, Reader) and layer.reads_queries}


@final
class _Shown:
    """The layers that have not seen this forward's queries yet; each is shown once."""

    def __init__(self, waiting: dict[int, Reader]) -> None:
        self.waiting = waiting

    def attend(self, attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        """What the model's own implementation gives; the layer whose keys are read is shown the queries first."""
        layer = self.waiting.pop(getattr(attention.module, "layer_idx", -1), None)
        if layer is not None:
            held = layer.store
            n_heads, n_tokens = held.exact("key")[1].shape[1], held.n_tokens - held.n_dropped
            if key.shape[1:3] != (n_heads, n_tokens):
                raise ValueError(
                    f"{type(attention.module).__name__} attends to keys of shape {tuple(key.shape)}, its cache holds "
                    f"{n_tokens} tokens of {n_heads} heads: tokens of such a layer cannot be chosen by its queries"
                )
            layer.attended(Queries(attention.query.detach(), attention.scale, attention.softcap, attention.sinks), key)
        return plain()
