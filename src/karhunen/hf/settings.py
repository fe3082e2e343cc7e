"""A model's configuration as plain settings, for planning: read through transformers' own classes, without weights.

Kinds of layers are those of transformers' caches; weights are counted on a model without data (PyTorch's meta device).
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from karhunen.hf.describe import layer_types
from karhunen.hf.embedded import explaining_settings, resolved
from karhunen.hf.gguf import silent_transformers
from karhunen.hf.model_sources import Reporter

KV_HEADS = "num_key_value_heads"
PER_LAYER = (KV_HEADS, "num_attention_heads", "head_dim", "sliding_window", "attention_chunk_size")
KEY_BIASES = ("k_proj.bias", "qkv_proj.bias", "query_key_value.bias", "c_attn.bias", "Wqkv.bias")


def settings_of(name_or_path: str | Path, progress: Reporter | None = None) -> tuple[dict[str, Any], str]:
    """Settings as `planning.reading` takes them, and where they are from: a folder, a config.json, an embedded name, or
    a hub's id (from its cache, else from the network). ModelUnavailable where there is none, or none of text."""
    import transformers

    given = Path(name_or_path).expanduser()
    path, local = (str(given), True) if given.is_file() else resolved(name_or_path, progress)
    with silent_transformers(), explaining_settings(path):
        config: Any = transformers.AutoConfig.from_pretrained(path, local_files_only=local)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    decoder = config.get_text_config(decoder=True)
    return {**_settings(decoder), **_counted(model)}, path if local else f"{path}, from the hub"


def _settings(config: Any) -> dict[str, Any]:
    types, windows = layer_types(config)
    layers: Any = getattr(config, "per_layer_config", None) or [config] * len(types)
    names = [name for name in PER_LAYER if any(hasattr(layer, name) for layer in layers) and _reads(config, name)]
    per_layer = [{name: _of_layer(layer, name, i) for name in names} for i, layer in enumerate(layers[: len(types)])]
    for i, window in windows.items():
        per_layer[i] |= {"sliding_window": window, "attention_chunk_size": window}
    own = {name: value for name, value in config.to_dict().items() if _reads(config, name)}
    own |= per_layer[0] if per_layer else {}
    return {**own, "model_type": config.model_type, "layer_types": types, "per_layer": per_layer}


def _reads(config: Any, name: str) -> bool:
    """Not KV heads that are written down for a class without grouped queries (GPT-NeoX)."""
    known: Any = getattr(type(config), "__dataclass_fields__", None)
    return name != KV_HEADS or known is None or name in known or name in getattr(config, "attribute_map", {})


def _of_layer(config: Any, name: str, index: int) -> Any:
    found = getattr(config, name, None)
    return found[min(index, len(found) - 1)] if isinstance(found, list | tuple) and found else found


def _counted(model: nn.Module) -> dict[str, Any]:
    """Weights by how they are read, and whether keys have a bias."""
    tied: Any = getattr(model, "tie_weights", None)
    if tied is not None:
        tied()  # as one, a shared weight counts once
    named = dict(model.named_parameters())
    reads: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    weights = {
        "n_parameters": sum(p.numel() for p in named.values()),
        "n_expert": sum(p.numel() for name, p in named.items() if ".experts." in name),
        "n_looked_up": 0 if reads is None or head is None or reads.weight is head.weight else reads.weight.numel(),
    }
    return {"weights": weights, "key_bias": any(name.endswith(KEY_BIASES) for name in named)}
