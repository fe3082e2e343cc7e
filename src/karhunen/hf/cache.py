"""A transformers cache whose full-attention layers hold bytes instead of numbers.

Attention gets dense keys and values: exact ones as they are, coded ones decoded for this call, so every model and every
attention implementation works. What came in the same call is exact while it is attended to, and coded afterwards,
layer by layer, so the peak falls too.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache

from karhunen.attention.reader import reader_of
from karhunen.codec import Codec, LayerCodec
from karhunen.device import HOST
from karhunen.hf.attention import NAME, register
from karhunen.hf.describe import identity_of
from karhunen.hf.history import History, HistoryTensor, Masks, OnQuery
from karhunen.hf.hooks import after_forward, before_forward
from karhunen.hf.in_graph import (
    InGraph,
    Mode,
    hands_over,
    is_compiled,
    register_operators,
    shares_layers,
    traced_update,
)
from karhunen.hf.positions import left_padding
from karhunen.hf.probe import decoder_of, text_config, uncompiled, untraced
from karhunen.hf.queries import show_queries
from karhunen.hf.shrinking import check_max_bytes, keep_within, shrink
from karhunen.hf.suits import check_window
from karhunen.statistics.need import SLOTS
from karhunen.store.account import Account
from karhunen.store.layer_store import LayerStore
from karhunen.store.positions import Offsets
from karhunen.store.report import LayerReport, Report
from karhunen.values import refuse_unless_a
from karhunen.windows.base import Window
from karhunen.windows.score import Queries


def dense_cache(model: nn.Module) -> DynamicCache:
    """transformers' own cache for this model: what a compressed cache is compared with."""
    return DynamicCache(config=text_config(model))


def static_cache(model: nn.Module, max_tokens: int) -> StaticCache:
    """transformers' cache of a fixed length, which is never copied to grow."""
    return StaticCache(config=text_config(model), max_cache_len=max_tokens)


@final
class RowOffsets:
    """What the layers of one cache share of the running forward: left padding of each row, None where it is zero, what
    its masks hide, and whether the model's attention reads bytes."""

    def __init__(self) -> None:
        self.now: Offsets | None = None
        self.reads_bytes = False
        self.masks = Masks()


@final
class CompressedLayer(DynamicLayer):
    """One layer: a `LayerStore` behind the interface of transformers' dynamic layer."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = True

    def __init__(
        self,
        codec: LayerCodec | None,
        window: Window,
        offsets: RowOffsets,
        exact_dtype: torch.dtype | None = None,
        keep_decoded: bool = False,
    ) -> None:
        self.store = LayerStore(codec, window, keep_decoded)
        self.offsets = offsets
        self.exact_dtype = exact_dtype
        self.is_initialized = False
        self.transient_bytes = 0
        self.how_read = ""
        self.on_query: OnQuery | None = None  # whoever looks at queries that read bytes
        self.graph = InGraph()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype and device; the tensors may hold no token."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Add tokens; returns keys and values of all tokens so far, the new ones exact. Where attention reads bytes
        the tensors returned hold no numbers (karhunen.hf.history), and in a compiled forward they are none
        (karhunen.hf.in_graph)."""
        if torch.compiler.is_compiling():
            return traced_update(self, key_states, value_states)
        return self.updated(key_states, value_states)

    def updated(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """As `update`, where nothing is compiled."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        was_empty = self.store.n_tokens == 0
        self.store.extend(self._as_stored(key_states), self._as_stored(value_states), self.offsets.now)
        key, value = key_states, value_states
        if not was_empty:
            key, value = self._history(key_states.dtype)
        waits = isinstance(key, HistoryTensor) and key.history.on_attended is not None
        if not waits and not self.reads_queries:
            self.store.flush()
        return key, value

    def begin(self, in_graph: bool) -> None:
        """A forward begins, which may be compiled or not."""
        mode: Mode = "python"
        if in_graph and self.store.selection is None:
            mode = "dense" if self.store.n_tokens else "first"
            mode = "bytes" if self._is_read_from_bytes else mode
        self.graph.begin(self, mode)

    @property
    def _is_read_from_bytes(self) -> bool:
        """Whether the running forward's attention is handed bytes."""
        if not (self.offsets.reads_bytes and self.store.n_coded and self.store.codec is not None):
            return False
        return reader_of(self.store.codec, self.store.snapshot()).mode != "decoded"

    @property
    def reads_queries(self) -> bool:
        """Whether the window waits for the queries of the running forward (`hf.queries` shows them); not where they
        read bytes, since that tells what they paid."""
        return self.store.waits_for_queries and not (self.store.observed is not None and self._is_read_from_bytes)

    def attended(self, queries: Queries, key: Tensor) -> None:
        """The queries of the tokens just added have read `key`, all tokens held."""
        self.store.observe(queries, key)
        self.store.flush()

    def _attended_bytes(self, queries: Queries, mask: Tensor | None, log_sum: Tensor | None) -> None:
        """The same, from bytes; without a `log_sum` they had to be decoded."""
        if log_sum is None:
            self.store.observe(queries, self.store.read()[0])
        else:
            self.store.observe_exact(queries, log_sum, mask)
        self.store.flush()

    def _history(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All tokens, to be read from bytes where that can be, else decoded."""
        codec, held = self.store.codec, self.store.snapshot()
        if self.offsets.reads_bytes and codec is not None and held.n_coded:
            attended = self._attended_bytes if self.store.observed is not None else None
            told = (self._note_read, self._note_dense, self.offsets.masks, attended, self.on_query)
            history = History(reader_of(codec, held), held, *told)
            if history.reader.mode != "decoded":
                return HistoryTensor(history, "key", dtype), HistoryTensor(history, "value", dtype)
            self._note_read(history.reader.description)
        elif held.n_coded:
            self._note_read("decoded (attn_implementation is not karhunen)")
        key, value = (held.dense(codec, slot).to(dtype) for slot in SLOTS)
        if held.n_coded or held.n_dropped:
            self._note_dense(key.nbytes + value.nbytes)
        return key, value

    def _note_read(self, how: str) -> None:
        self.how_read = how

    def _note_dense(self, n_bytes: int) -> None:
        self.transient_bytes = max(self.transient_bytes, n_bytes)

    def _as_stored(self, x: Tensor) -> Tensor:
        return x if self.exact_dtype is None else x.to(self.exact_dtype)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All keys, decoded; None before the first token."""
        return self.store.read()[0] if self.store.n_tokens else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All values, decoded; None before the first token."""
        return self.store.read()[1] if self.store.n_tokens else None

    @property
    def batch_size(self) -> int:
        """Rows held; −1 before the first token."""
        return self.store.exact("key")[1].shape[0] if self.store.n_tokens else -1

    def get_seq_length(self) -> int:
        """Tokens seen: where the next one stands."""
        return self.store.n_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Every token held is visible; dropped ones shift the others, which are all older than a query."""
        n_dropped = self.store.n_dropped
        return self.store.n_tokens - n_dropped + query_length, n_dropped

    def get_max_length(self) -> int:
        """Unbounded."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Unbounded, under its older name."""
        return -1

    def reset(self) -> None:
        """Drop everything, codes too."""
        self.store.reset()
        self.is_initialized = False
        self.transient_bytes = 0
        self.how_read = ""

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove that many tokens from the end if negative; if positive, keep that many (transformers before 5.20)."""
        count, n = int(tokens_to_remove), self.store.n_tokens  # assisted decoding counts in tensors
        if count != tokens_to_remove or count < -n:
            raise ValueError(f"a cache of {n} tokens is not cropped by {tokens_to_remove}; give a whole number")
        self.store.crop(n + count if count <= 0 else count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of `beam_idx`."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows; a boolean mask works too."""
        if indices.dtype == torch.bool:
            if self.store.n_tokens and len(indices) != self.batch_size:
                raise ValueError(f"a mask of {len(indices)} rows is not one of a cache of {self.batch_size} rows")
            indices = indices.nonzero().squeeze(-1)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, side by side."""
        if repeats < 1:
            raise ValueError(f"rows are not repeated {repeats} times; use 1 or more")
        if self.store.n_tokens:
            self.store.select(torch.arange(self.batch_size, device=HOST).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        rows = rows.to(HOST)
        n = self.batch_size
        if n >= 0 and rows.numel() and (rows.is_floating_point() or not 0 <= int(rows.min()) <= int(rows.max()) < n):
            raise ValueError(f"rows {rows.tolist()} are not among the {n} rows held; count from 0 to {n - 1}")
        self.store.select(rows)

    def offload(self) -> None:
        """Refused: coded bytes stay where attention reads them."""
        raise NotImplementedError("a compressed cache does not offload; use offloading=False")

    def prefetch(self) -> None:
        """Nothing was offloaded."""


@final
class CompressedCache(Cache):
    """A cache for `model` in which the layers of `codec` are coded and the others are transformers' own.

    ValueError, with the reason, if the codec was made for another model. Works with `generate`, beams, assisted
    decoding, left padding, several turns; `report()` says what is held. `exact_dtype` is the type in which the codec's
    layers keep their exact tokens: bfloat16 where a bfloat16 model computes in float32; None keeps them as they come.
    `keep_decoded` holds a decoded copy too, which makes steps faster and saves no memory: for scoring. `max_bytes`:
    after each forward a progressive cache that holds more gives refinements back (`shrink`), down to its base.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        exact_dtype: torch.dtype | None = None,
        keep_decoded: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        refuse_unless_a("model", model, nn.Module, would="load it first, as with karhunen.load")
        refuse_unless_a("codec", codec, Codec, would="fit one, or read one with Codec.from_pretrained")
        if exact_dtype is not None and not (isinstance(exact_dtype, torch.dtype) and exact_dtype.is_floating_point):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"exact_dtype={exact_dtype!r} holds no vectors; use torch.bfloat16, float16 or float32")
        if max_bytes is not None:
            check_max_bytes(codec, max_bytes)
        given, model = model, uncompiled(model)
        codec.check_model(identity_of(model))
        check_window(model, codec.window)
        register()  # whoever has such a cache may name the attention that reads it
        self.codec = codec
        self.max_bytes = max_bytes
        self.is_over = False  # whether it was said that the base alone is more
        self.offsets = RowOffsets()
        self.in_graph = is_compiled(given) and codec.window.reads == "never" and hands_over(model)
        if self.in_graph:
            register_operators()
        layers: list[Any] = list(dense_cache(model).layers)
        for index in codec.windowed:
            layer = codec.layers.get(index)
            layers[index] = CompressedLayer(layer, codec.window, self.offsets, exact_dtype, keep_decoded)
            layers[index].graph = InGraph(shared=self.in_graph and shares_layers(model))
        super().__init__(layers=layers)
        self._model = weakref.ref(model)
        self._watch(model)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As a layer's; ValueError for vectors that are not of that layer of the model, or of other rows."""
        if not torch.compiler.is_compiling():
            self._check_vectors(key_states, value_states, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_vectors(self, key: Tensor, value: Tensor, index: int) -> None:
        if not 0 <= index < len(self.layers):
            raise ValueError(f"there is no layer {index}; the model's cache has {len(self.layers)}")
        layer, shape = self.layers[index], self.codec.model.layers[index]
        if not isinstance(layer, CompressedLayer):
            return
        b, n = layer.batch_size if layer.store.n_tokens else key.shape[0], key.shape[-2]
        wanted = tuple((b, shape.n_kv_heads, n, dim) for dim in (shape.key_dim, shape.value_dim))
        if (key.shape, value.shape) != wanted or not (key.is_floating_point() and value.is_floating_point()):
            raise ValueError(
                f"layer {index} takes keys of {wanted[0]} and values of {wanted[1]}, in floating point, and was given "
                f"{tuple(key.shape)} and {tuple(value.shape)} in {key.dtype} and {value.dtype}: use a cache with the "
                "model and the rows it was made for"
            )

    def report(self) -> Report:
        """What each layer holds, in bytes, and why those not coded are exact."""
        rows = tuple(
            _layer_report(i, shape.kind, layer, self.codec.left_exact.get(i, ""))
            for i, (shape, layer) in enumerate(zip_longest(self.codec.model.layers, self.layers))  # shared: none
        )
        transient = max((layer.transient_bytes for layer in self.coded_layers()), default=0)
        return Report(self.codec.origin.recipe, rows, self.codec.table_bytes(), transient)

    def save(self, folder: str | Path, tokens: Tensor | None = None) -> None:
        """Write all that is held, to go on from any day (`karhunen.hf.session`); `tokens` `[b t]` are those of the text
        it has read, kept for whoever loads it."""
        from karhunen.hf.session import save_session

        save_session(self, folder, tokens)

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path, codec: Codec | None = None) -> "CompressedCache":
        """The cache as `save` left it; ValueError, with the reason, if this model cannot go on from it. `codec` spares
        a session that has its codec inside the reading of it, and is needed by one that has not."""
        from karhunen.hf.session import load_session

        return load_session(model, folder, codec)[0]

    def shrink(self, n_bytes: int) -> int:
        """Give back `n_bytes` or a little more, in place, coldest refinements first; fewer where all tokens are at
        their base. Returns the bytes given back. Tokens that come later are refined as little as those that are left.
        ValueError where nothing has refinements, or another cache shares them."""
        return shrink(self, n_bytes)

    def branch(self) -> "CompressedCache":
        """A cache that goes on from here by itself and shares what is coded: many questions to one document hold its
        bytes once. This cache may go on too. A branch with coded tokens of its own copies a layer's codes to read."""
        memo: dict[int, Any] = {id(layer.store): layer.store.branch() for layer in self.coded_layers()}
        made = deepcopy(self, memo)
        for layer in made.coded_layers():
            layer.on_query = None  # whoever looks at this cache looks at no other
        return made

    @property
    def shared_bytes(self) -> int:
        """Bytes of codes, scales and gains that belong to the cache this branched from, and to its other branches."""
        held = (layer.store.tensors() for layer in self.coded_layers())
        return sum(x.nbytes for tensors in held for name, x in tensors.items() if name.endswith(".shared"))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of `beam_idx`, which is brought to the host once for all layers."""
        super().reorder_cache(cast("Any", beam_idx.to(HOST)))

    @property
    def turns(self) -> bool:
        """Whether bytes depend on where tokens stand: a layer's vectors are turned by their positions to be coded."""
        sides = [layer.side(slot) for layer in self.codec.layers.values() for slot in SLOTS]
        return any(side.frame.needs_rotary and side.rotary is not None for side in sides)

    @property
    def model(self) -> nn.Module:
        """The model that reads it; ValueError if that is gone."""
        if (model := self._model()) is None:
            raise ValueError("the model of this cache is gone")
        return model

    def close(self) -> None:
        """Stop watching the model's forwards; happens by itself when the cache is no longer used."""
        self._stop_watching()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a compressed cache belongs to a model in this process and is not pickled; use cache.save(folder), and "
            "CompressedCache.load(model, folder) where it goes on"
        )

    def coded_layers(self) -> list[CompressedLayer]:
        """The layers that are this library's, in order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def _watch(self, model: nn.Module) -> None:
        """Learn each row's padding from the `position_ids` of forwards that use this cache."""
        inner = cast("nn.Module", getattr(model, "base_model", model))
        stopping = [before_forward(inner, partial(_note_offsets, weakref.ref(self)))]
        if (decoder := decoder_of(model)) is not inner:  # positions of images are worked out on the way to it
            stopping.append(before_forward(decoder, partial(_note_offsets, weakref.ref(self), inside=True)))
        shown = show_queries(model, weakref.ref(self)) if self.codec.window.reads != "never" else ExitStack()
        if self.max_bytes is not None:
            stopping.append(after_forward(inner, partial(_keep_within, weakref.ref(self))))
        for stop in stopping:
            shown.callback(stop)
        self._stop_watching: Callable[[], Any] = weakref.finalize(self, shown.close)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedCache":
        twin = cast("CompressedCache", object.__new__(type(self)))
        memo[id(self)] = twin
        skip = {"_model", "_stop_watching"}
        twin.__dict__.update({k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in skip})
        twin._model = self._model
        if (model := self._model()) is not None:
            twin._watch(model)
        return twin


@untraced
def _keep_within(cache_ref: "weakref.ref[CompressedCache]", module: nn.Module, args: Any, output: Any) -> None:
    if (cache := cache_ref()) is not None:
        keep_within(cache)


@untraced
def _note_offsets(
    cache_ref: "weakref.ref[CompressedCache]",
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    inside: bool = False,
) -> None:
    cache, positions = cache_ref(), kwargs.get("position_ids")
    if cache is None or not any(value is cache for value in (*args, *kwargs.values())):
        return
    if inside and not isinstance(positions, Tensor):
        return  # nothing that was not seen before
    cache.offsets.reads_bytes = getattr(text_config(module), "_attn_implementation", None) == NAME
    cache.offsets.masks.clear()
    if cache.in_graph and not inside:
        for layer in cache.coded_layers():
            layer.begin(in_graph=True)
    padding = left_padding(positions, cache.get_seq_length(), turns=cache.turns)
    if padding is None:
        if cache.offsets.now is not None:
            cache.offsets.now = cache.offsets.now.zero()
        return
    tokens = next((v for v in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if v is not None), None)
    if isinstance(tokens, Tensor) and tokens.shape[0] != padding.shape[0]:
        padding = padding.expand(tokens.shape[0]).clone()
    given = Offsets(padding)
    asked = given.is_known or cast("Tensor", positions).shape[-1] > 1  # a step's are asked for when its token is coded
    cache.offsets.now = None if cache.offsets.now is None and asked and not bool(given.known.any()) else given


def _layer_report(index: int, kind: str, layer: Any, reason: str) -> LayerReport:
    if isinstance(layer, CompressedLayer):
        store = layer.store
        if store.selection is not None and store.selection.decided and store.keeps_all_from_now_on:
            reason = f"{reason}; it chose when the first forward came, which fitted its budget: later tokens all stay"
        return LayerReport(index, kind, store.n_tokens, store.n_coded, reason, store.account(), layer.how_read)
    if layer is None:
        return LayerReport(index, kind, 0, 0, reason, Account())
    tensors = [t for t in _tensors_of(layer) if t.numel()]
    # a sliding layer may keep a view of a longer prompt alive: what counts is the memory behind it
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    account = Account(exact=size, dense=size, n_elements=sum(t.numel() for t in tensors))
    held = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
    return LayerReport(index, kind, held, 0, reason, account)


def _tensors_of(layer: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in vars(layer).values():
        if isinstance(value, Tensor) and value.ndim > 1:
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(v for v in cast("list[Any]", value) if isinstance(v, Tensor))
        elif isinstance(value, dict):
            found.extend(v for v in cast("dict[Any, Any]", value).values() if isinstance(v, Tensor))
    return found
