"""A compressed cache on disk: read a long prompt once, go on any day, as if it had never stopped.

    FOLDER/config.json           which model and codec, how far it has read, what each layer is
    FOLDER/tensors.safetensors   the bytes of every layer as they are held, and the codec's tables

Nothing is coded again, so the next token's logits are those of a cache that was never written, bit for bit. The model
must be the same to the last weight. The codec is inside, or is given again if the session was saved without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.codec import PART_PACKAGES, Codec
from karhunen.folder import read_folder, write_folder
from karhunen.hf.cache import CompressedCache, CompressedLayer
from karhunen.hf.describe import identity_of
from karhunen.hf.fingerprint import weights_fingerprint
from karhunen.hf.layer_state import layer_state, restore_layer
from karhunen.hf.probe import input_device, layer_devices
from karhunen.statistics.identity import LayerShape
from karhunen.store.layer_store import LayerStore
from karhunen.store.positions import Offsets
from karhunen.store.refined_state import RefinedState
from karhunen.store.state import StoreState
from karhunen.values import assemble, dismantle, kinds_in

FORMAT, VERSION = "karhunen-session", 2
READ = (1, VERSION)
"""Versions that are read: 1 does not say the model's dtype, nor the codec in words, and has `read_seconds`."""
KIND_PACKAGES = (*PART_PACKAGES, "karhunen.store", "karhunen.hf.session")


@final
@dataclass(frozen=True)
class LayerState:
    """One layer: the class that holds it, and its attributes; of a compressed layer its store apart."""

    kind: str
    attributes: Mapping[str, Any]
    store: StoreState | RefinedState | None = None


@final
@dataclass(frozen=True)
class SessionState:
    """All that a cache holds. `tokens` are those of the text, where known: what the cache has read, and after it what
    was chosen and not read yet. `dtype` is that of the model's weights; `made_by` describes the codec, `codec` is its
    fingerprint."""

    weights: str
    codec: str
    exact_dtype: str
    keep_decoded: bool
    offsets: Int[Tensor, " b"] | None
    layers: tuple[LayerState, ...]
    tokens: Int[Tensor, "b t"] | None = None
    dtype: str = ""
    made_by: str = ""


def save_session(
    cache: CompressedCache,
    folder: str | Path,
    tokens: Int[Tensor, "b t"] | None = None,
    with_codec: bool = True,
) -> None:
    """Write all that `cache` holds, whole or not at all; ValueError if a layer keeps what cannot be written."""
    model = cache.model
    if tokens is not None and tokens.shape[-1] < cache.get_seq_length():
        raise ValueError(f"{tokens.shape[-1]} tokens were given for a cache that has read {cache.get_seq_length()}")
    compressed = cache.coded_layers()
    state = SessionState(
        weights=weights_fingerprint(model),
        codec=cache.codec.fingerprint(),
        exact_dtype=_dtype_name(compressed[0].exact_dtype) if compressed else "",
        keep_decoded=bool(compressed) and compressed[0].store.keeps_decoded,
        offsets=None if cache.offsets.now is None else cache.offsets.now.known,
        layers=tuple(_layer(layer) for layer in cache.layers),
        tokens=None if tokens is None else tokens.cpu(),
        dtype=_dtype_name(next(model.parameters()).dtype),
        made_by=cache.codec.description,
    )
    tensors: dict[str, Tensor] = {}
    body = {"session": dismantle(state, tensors, "session")}
    body["codec"] = dismantle(cache.codec, tensors, "codec") if with_codec else None
    write_folder(Path(folder), FORMAT, VERSION, body, tensors)


def load_session(
    model: nn.Module, folder: str | Path, codec: Codec | None = None
) -> tuple[CompressedCache, SessionState]:
    """The cache as it was saved, and what was said of it; ValueError, with the reason, if it cannot be continued."""
    config, tensors = read_folder(Path(folder), FORMAT, *READ)
    kinds = kinds_in(*KIND_PACKAGES)
    state = assemble(_as_now(config), kinds, tensors)
    if not isinstance(state, SessionState):
        raise ValueError(f"{folder} holds a {type(state).__name__}, not a session")
    if codec is None or (codec.fingerprint() != state.codec and not state.made_by):
        inside = assemble(config.get("codec"), kinds, tensors)
    else:
        inside = None
    made_by = state.made_by or (inside.description if isinstance(inside, Codec) else state.codec)
    if codec is None:
        if not isinstance(inside, Codec):
            raise ValueError(f"{folder} was saved without its codec; give the codec {made_by}")
        inside.check()
        codec = inside
    if codec.fingerprint() != state.codec:
        raise ValueError(f"{folder} was made with the codec {made_by}; this one is {codec.description}")
    codec.check_model(identity_of(model))
    if (weights := weights_fingerprint(model)) != state.weights:
        raise ValueError(f"{folder} was made with weights {state.weights}, this model's are {weights}")
    then, now = state.dtype or _dtype_seen(state), _dtype_name(next(model.parameters()).dtype)
    if then and then != now:
        raise ValueError(f"{folder} was made by a model in {then}, this one is in {now}; load the model in {then}")
    exact_dtype = getattr(torch, state.exact_dtype) if state.exact_dtype in _DTYPES else None
    cache = CompressedCache(model, codec, exact_dtype, state.keep_decoded)
    if len(cache.layers) != len(state.layers):
        raise ValueError(f"{folder} holds {len(state.layers)} layers, this model's cache has {len(cache.layers)}")
    here, first = layer_devices(model), input_device(model)
    for index, (layer, held) in enumerate(zip(cache.layers, state.layers, strict=True)):
        try:
            _restore(layer, held, codec.model.layers[index], here.get(index, first), state.keep_decoded)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"layer {index} in {folder} cannot be restored: {error}") from error
    cache.offsets.now = None if state.offsets is None else Offsets(state.offsets)
    if len({layer.get_seq_length() for layer in cache.coded_layers()}) > 1:
        raise ValueError(f"{folder} holds layers of different lengths; it cannot be continued")
    return cache, state


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_APART = ("store", "offsets", "exact_dtype", "graph", "on_query")  # of a compressed layer


def _layer(layer: Any) -> LayerState:
    if not isinstance(layer, CompressedLayer):
        return LayerState(type(layer).__name__, layer_state(layer))
    return LayerState(type(layer).__name__, layer_state(layer, _APART), layer.store.state())


def _restore(layer: Any, held: LayerState, shape: LayerShape, device: torch.device, keep_decoded: bool) -> None:
    if type(layer).__name__ != held.kind:
        raise ValueError(f"it is a {held.kind}, this model's is a {type(layer).__name__}")
    if not isinstance(layer, CompressedLayer):
        restore_layer(layer, held.attributes, device)
        return
    if held.store is None:
        raise ValueError("it has no bytes")
    restore_layer(layer, held.attributes, device, _APART)
    store = layer.store
    layer.store = LayerStore.restored(held.store.to(device), store.codec, store.window, shape, keep_decoded)


def _as_now(config: dict[str, Any]) -> Any:
    """What a session of this version says, of one of any version that is read."""
    session = config.get("session")
    if config["version"] == 1 and isinstance(session, dict):
        return {name: value for name, value in cast("dict[str, Any]", session).items() if name != "read_seconds"}
    return session


def _dtype_seen(state: SessionState) -> str:
    """Of the vectors that a session of version 1 was given; empty if it does not say."""
    seen = (layer.attributes.get("dtype") for layer in state.layers if layer.store is not None)
    return next((str(each["dtype"]) for each in seen if isinstance(each, Mapping) and "dtype" in each), "")


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
