"""Shows the layers of a compressed cache the queries that read it, where its window chooses tokens by them.

    forward with the cache ─▶ attention called under a name of ours ─▶ layer.attended(queries, key) ─▶ the model's own

The model goes by that name only while such a forward runs, and only if some layer still waits for queries: a window
that decides once routes the prompt's forward and no other. Afterwards the model is as it was, also after an error.
Whose queries are shown is a matter of the thread that runs the forward: others, of the same model, run undisturbed.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, final, runtime_checkable

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from karhunen.hf.capture import (
    SHOWN,
    Attention,
    attention_call,
    can_be_routed,
    implementations,
    own_attention,
    plain_implementation,
)
from karhunen.hf.hooks import after_forward, before_forward
from karhunen.hf.implementation import borrow
from karhunen.hf.probe import untraced
from karhunen.store.layer_store import LayerStore
from karhunen.windows.score import Queries

Attend = Callable[[Attention, Tensor, Tensor, Callable[[], Any]], Any]
NAMES = {previous: SHOWN + previous for previous in ("sdpa", "eager")}


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
    if not can_be_routed(model):
        raise ValueError(f"the attention of {type(model).__name__} does not go through transformers' interface")
    register()
    running = ExitStack()

    @untraced
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held = cache()
        if held is None or not any(value is held for value in (*args, *kwargs.values())):
            return
        waiting = _waiting(held)
        if waiting:
            routed = cast("PreTrainedModel", model)
            name = NAMES[plain_implementation(routed, implementations(model))]
            running.callback(borrow(model, name, stands_over=True))
            running.callback(_SHOWN.set, _SHOWN.get())
            _SHOWN.set(_Watcher(_Shown(waiting).attend, cache))

    @untraced
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if (shown := _SHOWN.get()) is not None and shown.cache is cache:  # else a forward of another cache ends
            running.close()

    inner = cast("nn.Module", getattr(model, "base_model", model))
    stack = ExitStack()
    stack.callback(running.close)
    stack.callback(before_forward(inner, enter))
    stack.callback(after_forward(inner, leave))
    return stack


@contextmanager
def showing(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Every attention call that this thread makes of the model becomes `attend(attention, key, value, plain)`, where
    `plain()` is what the model's own implementation gives: (output [b t q e], weights or None). Those of other threads
    are left alone. ValueError as `show_queries`."""
    if not can_be_routed(model):
        raise ValueError(f"the attention of {type(model).__name__} does not go through transformers' interface")
    register()
    routed = cast("PreTrainedModel", model)
    give_back = borrow(model, NAMES[plain_implementation(routed, implementations(model))], stands_over=True)
    token = _SHOWN.set(_Watcher(attend))
    try:
        yield
    finally:
        _SHOWN.reset(token)
        give_back()


def register() -> None:
    """Make the names known to transformers; doing it again changes nothing."""
    for previous, name in NAMES.items():
        AttentionInterface.register(name, partial(_shown_attention, previous))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[previous])


@untraced
def _shown_attention(
    previous: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **arguments: Any,
) -> Any:
    plain = partial(own_attention(module, previous), module, query, key, value, attention_mask, **arguments)
    if (shown := _SHOWN.get()) is None:
        return plain()
    return shown.attend(attention_call(module, query, attention_mask, arguments), key, value, plain)


def _waiting(cache: Cache) -> dict[int, Reader]:
    return {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, Reader) and layer.reads_queries}


@final
@dataclass(frozen=True)
class _Watcher:
    """Whoever looks on, for a cache or for none."""

    attend: Attend
    cache: "weakref.ref[Any] | None" = None


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


_SHOWN: ContextVar[_Watcher | None] = ContextVar("shown", default=None)
"""To whom the attention calls of this thread's forward are shown."""
