"""What `torch.compile` sees of a compressed layer: operators that it does not look into, named by a handle.

    karhunen::append(handle, key, value)               the layer takes new tokens, and codes those that leave its window
    karhunen::dense(handle, key, value, n) ─▶ K, V     the same; then all tokens held, decoded
    karhunen::attend(handle, query, …)     ─▶ output   attention to what the last append left, from bytes

A handle is one number in the host's memory that stands for a live layer. Each operator says that it changes its handle,
so a compiler keeps all of them, in their order. What is decided on the host (how many tokens are coded, where they
stand) is decided inside. Between append and attend a model holds `Handed` in place of keys and values: an object of the
tracer's, no tensor, so a model that computes with its cached keys cannot be traced past it; `hands_over` finds those
models beforehand, and they are left to Python, as is all that is not compiled.
"""

import weakref
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, Literal, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import DynamicCache

from karhunen.device import HOST
from karhunen.hf.byte_reads import attention_to
from karhunen.hf.capture import Attention, can_be_routed
from karhunen.hf.probe import forward, inference, probe_tokens, text_config, uncompiled, untraced
from karhunen.hf.queries import showing

Mode = Literal["python", "first", "dense", "bytes"]
"""What the next forward finds in a layer: nothing that can be traced, no token yet, tokens to decode, bytes to read."""


_live: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = count()


@final
class InGraph:
    """One layer's part in compiled forwards. `given` is what its last update returned, until attention has read it, or
    until the next forward where `shared`: other layers read it too."""

    def __init__(self, shared: bool = False) -> None:
        self.mode: Mode = "python"
        self.handle = torch.full((1,), -1, dtype=torch.int64, device=HOST)
        self.given: tuple[Tensor, Tensor] | None = None
        self.shared = shared

    def begin(self, layer: Any, mode: Mode) -> None:
        """A forward begins; a layer that was copied gets a handle of its own."""
        self.mode, self.given = mode, None
        if mode != "python" and _live.get(int(self.handle)) is not layer:
            number = next(_numbers)
            _live[number] = layer
            with torch.inference_mode(mode=False):
                self.handle = torch.full((1,), number, dtype=torch.int64, device=HOST)

    def taken(self) -> tuple[Tensor, Tensor]:
        """What the last update left for attention; AssertionError if it left nothing."""
        given = self.given
        assert given is not None, "a layer is updated before it is attended to"
        if not self.shared:
            self.given = None
        return given

    def __deepcopy__(self, memo: dict[int, Any]) -> "InGraph":
        return InGraph(self.shared)


@final
class Handed:
    """Keys or values of a layer on their way from its cache to attention, in a compiled forward."""

    def __init__(self, layer: Any, n_values: int) -> None:
        self.layer = layer
        self.n_values = n_values  # of a value vector


def traced_update(layer: Any, key: Tensor, value: Tensor) -> tuple[Any, Any]:
    """A layer's update as the tracer meets it; where gradients may be asked for, and in mode `python`, the graph
    breaks here."""
    mode = layer.graph.mode
    if mode == "python" or torch.is_grad_enabled():
        return _in_python(layer, key, value)
    if mode == "dense":
        n = layer.store.n_tokens - layer.store.n_dropped + key.shape[2]
        return torch.ops.karhunen.dense(layer.graph.handle, key, value, n)
    torch.ops.karhunen.append(layer.graph.handle, key, value)
    if mode == "first":
        return key, value
    handed = Handed(layer, value.shape[3])
    return handed, handed


@untraced
def _in_python(layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return layer.updated(key, value)


def _layer(handle: Tensor) -> Any:
    found = _live.get(int(handle))
    if found is None:
        raise ValueError("the cache of this forward is gone")
    return found


def _append(handle: Tensor, key: Tensor, value: Tensor) -> None:
    layer = _layer(handle)
    made = layer.updated(key, value)
    layer.graph.given = made if layer.graph.mode == "bytes" else None  # a prompt's are the model's own


def _dense(handle: Tensor, key: Tensor, value: Tensor, n: int) -> tuple[Tensor, Tensor]:
    k, v = (x.contiguous() for x in _layer(handle).updated(key, value))
    return k, v


def _attend(
    handle: Tensor,
    query: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    e: int,
) -> Tensor:
    layer = _layer(handle)
    return attention_to(layer.graph.taken(), query, mask, sinks, scale, softcap)


@cache
def register_operators() -> None:
    """Make the operators known to torch, at first use."""
    made: Any = torch.library.custom_op
    append = made(
        "karhunen::append",
        _append,
        mutates_args=("handle",),
        schema="(Tensor(a!) handle, Tensor key, Tensor value) -> ()",
    )
    append.register_fake(lambda handle, key, value: None)
    dense = made(
        "karhunen::dense", _dense, mutates_args=("handle",),
        schema="(Tensor(a!) handle, Tensor key, Tensor value, SymInt n) -> (Tensor, Tensor)",
    )  # fmt: skip
    dense.register_fake(
        lambda handle, key, value, n: tuple(x.new_empty(*x.shape[:2], n, x.shape[3]) for x in (key, value))
    )
    attend = made(
        "karhunen::attend", _attend, mutates_args=("handle",),
        schema="(Tensor(a!) handle, Tensor query, Tensor? mask, Tensor? sinks, float scale, float? softcap, SymInt e) "
        "-> Tensor",
    )  # fmt: skip
    attend.register_fake(
        lambda handle, query, mask, sinks, scale, softcap, e: query.new_empty(
            query.shape[0], query.shape[2], query.shape[1], e
        )
    )


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile(model)` or `model.compile()` was called."""
    return uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None


_handing: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


def hands_over(model: nn.Module) -> bool:
    """Whether every attention of the model gets the very tensors that its cache returned, and nothing else looks at
    them. Found out by two short forwards that are not compiled, and remembered as long as the model lives."""
    model = uncompiled(model)
    if model not in _handing:
        _handing[model] = can_be_routed(model) and _watched(model)
    return _handing[model]


def shares_layers(model: nn.Module) -> bool:
    """Whether some layer reads what another one has cached."""
    return any(getattr(module, "is_kv_shared_layer", False) for module in uncompiled(model).modules())


def _watched(model: nn.Module) -> bool:
    ids, watch = probe_tokens(model), _Watch()

    def attend(attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        watch.is_touched |= not (watch.knows(key) and watch.knows(value))
        return watch.unseen(plain)

    cache = _WatchedCache(model, watch)
    with inference(model), torch.compiler.set_stance("force_eager"), showing(model, attend), watch:
        for part in (ids, ids[:, :1]):
            forward(model, cache, part)
    return not watch.is_touched


@final
class _Watch(TorchFunctionMode):
    """Notes whether anything but the cache and attention looks at what the cache returned."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, Tensor] = {}
        self.is_looking = True
        self.is_touched = False

    def knows(self, x: Tensor) -> bool:
        """Whether the cache returned it."""
        return id(x) in self.given

    def unseen(self, run: Callable[[], Any]) -> Any:
        """What `run` does is not looked at."""
        self.is_looking, before = False, self.is_looking
        try:
            return run()
        finally:
            self.is_looking = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_looking:
            leaves = pytree.tree_leaves((args, kwargs))
            self.is_touched |= any(isinstance(x, Tensor) and self.knows(x) for x in leaves)
        return func(*args, **(kwargs or {}))


@final
class _WatchedCache(DynamicCache):
    """transformers' own, watched."""

    def __init__(self, model: nn.Module, watch: _Watch) -> None:
        super().__init__(config=text_config(model))
        self.watch = watch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store, and remember what is returned: views, since the cache itself looks at what it holds."""
        plain = super().update

        def stored() -> tuple[Tensor, Tensor]:
            key, value = plain(key_states, value_states, layer_idx, *args, **kwargs)
            return key.view_as(key), value.view_as(value)

        made = cast("tuple[Tensor, Tensor]", self.watch.unseen(stored))
        self.watch.given.update({id(x): x for x in made})
        return made
