"""Which layers a model caches, of what kind and shape, and a name for the model that survives a reload.

Kinds come from the model's own layer types; shapes from a forward of a few tokens, never from the configuration,
which may lack them (head_dim) or mean something else (latent attention caches neither keys nor values).
"""

import hashlib
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs

from karhunen.device import HOST
from karhunen.hf.probe import Update, probe_tokens, text_config, updates
from karhunen.statistics.identity import LayerShape, ModelIdentity

SLIDING_TYPES = ("sliding_attention", "chunked_attention", "reference_sliding_attention")
WEIGHT_SAMPLES = 16

# What the cache depends on: sizes, heads, layers, positions, attention and norms. Other settings are left out, because
# a newer transformers writes more of them for the same model; what only they change, the weights' own hash tells.
_SAYS_ARCHITECTURE = (
    *("head", "hidden", "layer", "vocab", "model_type", "dim", "embd", "size", "rank", "norm", "eps", "expert"),
    *("rope", "rotary", "theta", "factor", "position", "window", "chunk", "attention", "attn", "softcap", "scal"),
)
_VOLATILE = (
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "_attn_implementation"),
    "partial_rotary_factor",  # written twice by some versions; the copy in rope_parameters moves the frequencies
)


_Written = list[tuple["weakref.ref[Tensor]", int, int]]
_KNOWN: "WeakKeyDictionary[nn.Module, tuple[_Written, bytes, ModelIdentity]]" = WeakKeyDictionary()
_HELD: "WeakKeyDictionary[nn.Module, ModelIdentity]" = WeakKeyDictionary()


def identity_of(model: nn.Module) -> ModelIdentity:
    """`describe(model)`, remembered until a weight is written to: by training, by `load_state_dict`.

    PyTorch does not count what is written through `weight.data`. Of each weight one number is looked at for that, so
    a merged adapter is seen, and a change of a few numbers by that way is not."""
    if (held := _HELD.get(model)) is not None:
        return held
    looks = _glance(model)
    if (known := _KNOWN.get(model)) is not None and known[1] == looks and _as_written(model, known[0]):
        return known[2]
    made = describe(model)
    _KNOWN[model] = [(weakref.ref(parameter), *_written(parameter)) for parameter in model.parameters()], looks, made
    return made


@contextmanager
def identity_held(model: nn.Module) -> Iterator[None]:
    """The identity stays the one it is now, whatever is written into the model inside."""
    before = _HELD.get(model)
    _HELD[model] = identity_of(model)
    try:
        yield
    finally:
        del _HELD[model]
        if before is not None:
            _HELD[model] = before


def _as_written(model: nn.Module, before: _Written) -> bool:
    """Whether the model has the same parameters, and nothing was written into them."""
    now = list(model.parameters())
    return len(now) == len(before) and all(
        seen() is parameter and (where, n_writes) == _written(parameter)
        for parameter, (seen, where, n_writes) in zip(now, before, strict=True)
    )


def _glance(model: nn.Module) -> bytes:
    """The middle number of each weight, in one copy for each device and dtype; of those that are plain numbers."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.numel():
            if parameter.element_size() < 2 or parameter.is_meta or not parameter.is_contiguous():
                continue
            number = parameter.detach().view(-1)[parameter.numel() // 2]
            found.setdefault((parameter.device, parameter.dtype), []).append(number)
    return b"".join(torch.stack(numbers).to(HOST).view(torch.uint8).numpy().tobytes() for numbers in found.values())


def _written(parameter: Tensor) -> tuple[int, int]:
    """Where a parameter lies, if it says so, and how often it was written to, which inference mode does not count."""
    n_writes = 0 if parameter.is_inference() else parameter._version  # pyright: ignore[reportPrivateUsage]
    try:
        return parameter.data_ptr(), n_writes
    except (TypeError, RuntimeError):
        return 0, n_writes


def describe(model: nn.Module) -> ModelIdentity:
    """Identity of a model and the shape of each of its cache layers.

    Runs a ten-token forward. ValueError if the model has no attention cache at all.
    """
    config = text_config(model)
    seen = updates(model, probe_tokens(model))
    types, windows = layer_types(config)
    n_layers = max(len(types), int(getattr(config, "num_hidden_layers", 0)), max(seen, default=-1) + 1)
    layers = tuple(
        _shape(types[i] if i < len(types) else "shared", windows.get(i), seen.get(i), _query_heads(config, i))
        for i in range(n_layers)
    )
    if not seen:
        kinds = sorted(set(types))
        raise ValueError(f"{type(model).__name__} has no attention cache to compress: its layers are {kinds}")
    return ModelIdentity(str(config.model_type), config_hash(config), weights_hash(model), layers)


def layer_types(config: Any) -> tuple[list[str], dict[int, int]]:
    """transformers' name for the kind of each cache layer, and the windows of sliding ones, in tokens."""
    found: tuple[list[str], Any] = get_layer_types_and_kwargs(config)
    types, arguments = found
    per_layer = arguments if isinstance(arguments, list) else [arguments] * len(types)  # one for all before 5.20
    windows = {i: int(a["sliding_window"]) for i, a in enumerate(per_layer) if a.get("sliding_window") is not None}
    return list(types), windows


def config_hash(config: Any) -> str:
    """Sixteen hex digits of what the configuration says of the architecture.

    Names, paths, dtype, attention implementation, token ids and versions are left out.
    """
    text = json.dumps(_architectural(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_hash(model: nn.Module) -> str:
    """Sixteen hex digits of a sample of the weights rounded to bfloat16; empty where they are not plain numbers.

    Independent of parameter names, of the dtype (bfloat16, float32) the weights were loaded in, and of the head on top.
    """
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        return ""
    digests: list[bytes] = []
    body: Any = getattr(model, "base_model", model)
    for parameter in body.parameters():
        if not parameter.dtype.is_floating_point or parameter.element_size() < 2 or parameter.is_meta:
            return ""
        weight = parameter.detach()
        sample = weight.flatten()[sampled_at(weight.numel()).to(weight.device)]
        digests.append(sample_digest(tuple(weight.shape), sample))
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


def sampled_at(count: int) -> Tensor:
    """Which of a weight's `count` numbers, flattened, its hash is of."""
    return torch.linspace(0, max(count - 1, 0), min(WEIGHT_SAMPLES, count), dtype=torch.float64, device=HOST).long()


def sample_digest(shape: tuple[int, ...], sample: Tensor) -> bytes:
    """Of one weight."""
    return hashlib.sha256(
        repr(shape).encode() + sample.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
    ).digest()


def _architectural(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that describe the architecture and are switched on."""
    kept = {str(k): v for k, v in config.items() if _says_architecture(str(k))}
    return {k: v for k, v in kept.items() if v not in (None, False, {}, [], 0, 0.0)}


def _says_architecture(key: str) -> bool:
    if key in _VOLATILE or key.startswith("_") or key.endswith(("dropout", "pdrop", "_token_id")):
        return False
    return any(part in key for part in _SAYS_ARCHITECTURE)


def _shape(layer_type: str, window: int | None, update: Update | None, n_query_heads: int) -> LayerShape:
    if update is None:
        what = "shared" if layer_type == "dummy" else layer_type  # transformers' word since 5.20; a shorter list before
        return LayerShape("other", note=f"{what} layer: it keeps no keys and values of its own")
    key, value = update
    if key.ndim != 4 or value.ndim != 4 or key.shape[1] != value.shape[1]:
        return LayerShape("other", note=f"{layer_type} layer: it caches {tuple(key.shape)} and {tuple(value.shape)}")
    sizes = (key.shape[1], n_query_heads, key.shape[-1], value.shape[-1])
    if layer_type == "full_attention":
        return LayerShape("full", *sizes)
    if layer_type in SLIDING_TYPES:
        note = "" if layer_type == "sliding_attention" else layer_type
        return LayerShape("sliding", *sizes, window_tokens=window, note=note)
    return LayerShape("other", *sizes, note=f"{layer_type} layer: it keeps more than keys and values")


def _query_heads(config: Any, layer: int) -> int:
    per_layer = getattr(config, "per_layer_config", None)
    config = per_layer[layer] if per_layer is not None and layer < len(per_layer) else config
    for name in ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"):
        if value := getattr(config, name, None):
            return int(value[layer]) if isinstance(value, list | tuple) else int(value)
    return 0
