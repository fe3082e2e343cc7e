"""What of a model takes memory while it runs: bytes of weights by device, widths of what a token becomes in a layer.

Read from the configuration and the parameters' shapes, so a model without data (on PyTorch's meta device) will do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from karhunen.device import HOST
from karhunen.hf.checkpointing import decoder_layers
from karhunen.hf.describe import layer_types
from karhunen.hf.probe import n_positions, text_config


@final
@dataclass(frozen=True)
class LayerSizes:
    """One decoder layer: where it is, its weights, and how many numbers stand for a token in its parts."""

    device: str
    weight_bytes: int
    query: int
    key: int
    value: int
    n_query_heads: int
    n_kv_heads: int
    mlp: int  # the widest hidden state of the feed-forward part, over all experts a token visits
    latent: tuple[int, int] | None = None  # rotary part and latent, where these are cached and expanded to be read

    @property
    def cached(self) -> tuple[tuple[int, int], int]:
        """Numbers cached for a token as keys (what turns) and as values, and the heads that they are of."""
        return ((self.key, self.value), self.n_kv_heads) if self.latent is None else (self.latent, 1)


@final
@dataclass(frozen=True)
class ModelSizes:
    """A whole model. `other_weights` are bytes outside decoder layers, by device; the head is on `head_device`."""

    name: str
    dtype_bytes: int
    hidden: int
    vocabulary: int
    positions: int
    full_layers: tuple[int, ...]
    writes_scores: bool  # attention makes a table of every score (eager)
    layers: tuple[LayerSizes, ...]
    other_weights: Mapping[str, int]
    head_device: str

    @property
    def devices(self) -> tuple[str, ...]:
        """All that hold a part, in the order in which a token meets them."""
        return tuple(dict.fromkeys([*(layer.device for layer in self.layers), *self.other_weights]))

    def weight_bytes(self, device: str) -> int:
        """Bytes of weights on one device."""
        return self.other_weights.get(device, 0) + sum(x.weight_bytes for x in self.layers if x.device == device)


def sizes_of(model: nn.Module, device_map: Mapping[str, Any] | None = None) -> ModelSizes:
    """Sizes of a model where it is, or where `device_map` (module name to device, as accelerate has it) would put it.

    ValueError for models that are not decoders of text.
    """
    config = text_config(model)
    names = {module: name for name, module in model.named_modules()}
    blocks = decoder_layers(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    others: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            device = _place(name, device_map) or _device(parameter, model)
            others[device] = others.get(device, 0) + parameter.numel() * parameter.element_size()
    layers = tuple(
        _layer(block, config, i, _place(names[block], device_map) or _device(next(block.parameters()), model))
        for i, block in enumerate(blocks)
    )
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    last = layers[-1].device if layers else next(iter(others))
    at_head = last if head is None else _place(names.get(head, ""), device_map) or _device(head.weight, model)
    kinds = layer_types(config)[0][: len(layers)]
    return ModelSizes(
        name=str(config.model_type),
        dtype_bytes=_dtype(model).itemsize,
        hidden=_first(config, "hidden_size", "n_embd", "d_model"),
        vocabulary=int(getattr(config, "vocab_size", 0) or 0),
        positions=n_positions(model),
        full_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention") or tuple(range(len(layers))),
        writes_scores=getattr(config, "_attn_implementation", None) == "eager"
        or not getattr(model, "_supports_sdpa", True),
        layers=layers,
        other_weights=others,
        head_device=at_head,
    )


def _layer(block: nn.Module, config: Any, index: int, device: str) -> LayerSizes:
    n_query = _each(config, index, "num_attention_heads", "n_head", "n_heads", "num_heads") or 1
    n_kv = _each(config, index, "num_key_value_heads", "num_kv_heads") or n_query
    width = _each(config, index, "head_dim") or _first(config, "hidden_size", "n_embd", "d_model") // n_query
    key, value, latent = width, width, None
    if rank := getattr(config, "kv_lora_rank", None):  # latent attention: what is cached is narrower than what is read
        n_kv, key = n_query, config.qk_nope_head_dim + config.qk_rope_head_dim
        value = getattr(config, "v_head_dim", rank)
        latent = config.qk_rope_head_dim, rank
    return LayerSizes(
        device=device,
        weight_bytes=sum(p.numel() * p.element_size() for p in block.parameters()),
        query=n_query * key,
        key=n_kv * key,
        value=n_kv * value,
        n_query_heads=n_query,
        n_kv_heads=n_kv,
        mlp=_mlp(config, index),
        latent=latent,
    )


def _mlp(config: Any, index: int) -> int:
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    dense = _each(config, index, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * hidden
    per_token = getattr(config, "num_experts_per_tok", None)
    if not per_token:
        return dense
    expert = _each(config, index, "moe_intermediate_size") or dense
    shared = _each(config, index, "shared_expert_intermediate_size") or 0
    return max(dense, int(per_token) * (expert + hidden) + shared)


def _each(config: Any, index: int, *names: str) -> int:
    """A setting of one layer: the same for all, a list, or in a configuration of its own; 0 if there is none."""
    own = getattr(config, "per_layer_config", None)
    here = own[index] if own is not None and index < len(own) else config
    for name in names:
        found = getattr(here, name, None)
        if isinstance(found, list | tuple) and found:
            found = found[min(index, len(found) - 1)]
        if isinstance(found, int) and found:
            return found
    return 0


def _first(config: Any, *names: str) -> int:
    return _each(config, 0, *names)


def _place(name: str, device_map: Mapping[str, Any] | None) -> str:
    """The device of the longest entry that the name begins with; empty if there is none."""
    fitting = [key for key in device_map or {} if not key or name == key or name.startswith(f"{key}.")]
    return "" if not fitting else _spelled((device_map or {})[max(fitting, key=len)])


def _spelled(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def _device(parameter: torch.Tensor, model: nn.Module) -> str:
    """Where a parameter is; weights that hooks bring from elsewhere count in the host's memory."""
    return str(HOST) if parameter.is_meta else str(parameter.device)


def _dtype(model: nn.Module) -> torch.dtype:
    """What hidden states are in: the widest floating type of few bytes that the weights have."""
    found = getattr(model, "dtype", None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32
