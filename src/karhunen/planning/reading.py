"""A model's shape from the settings of its configuration (config.json), as plain values: nothing heavy is imported.

    layer_types, heads, head_dim, windows, states ──▶ CacheLayer for each layer

Settings are those that transformers' own classes write; where config.json leaves a default unsaid, `layer_types` is
worked out as the class of that `model_type` does (layer_kinds.py). What is read from the configuration of an unknown
kind is refused, not guessed: a plan that leaves layers out would promise room that is not there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from karhunen.planning.layer_kinds import layer_kinds, with_default_window
from karhunen.planning.shape import CacheLayer, ModelShape, Weights

SLIDING = ("sliding_attention", "chunked_attention", "reference_sliding_attention", "hybrid_sliding")
STATES = ("linear_attention", "conv", "mamba")
BOTH = ("hybrid", "hybrid_sliding")  # keys and values beside a state
NOTHING = ("dummy", "moe", "mlp")  # no cache of their own
KNOWN = ("full_attention", *SLIDING, *STATES, "hybrid", *NOTHING)
MOST_LAYERS, MOST = 10_000, 1 << 40  # of a model, of anything else that is counted: beyond them a setting is a slip
BIASED = ("phi", "gpt2", "opt", "gpt_oss")  # the class has a key bias whatever config.json says; so has every Qwen2
BIASES = ("attention_bias", "qkv_bias", "use_qkv_bias")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
NEEDS_TRANSFORMERS = (
    "is of a kind that is read through transformers only; `pip install 'karhunen[hf]'`, or name a model of the table"
)


def read_shape(settings: Mapping[str, Any], name: str, source: str, *, complete: bool = True) -> ModelShape:
    """The shape of a model; ValueError where a setting is missing or of a kind that is not known.

    Beside those of config.json, `per_layer` may give settings of single layers, `weights` those of `Weights`, and
    `key_bias` whether keys have a bias. `complete=False`: a config.json as it stands, whose class was not asked what it
    leaves unsaid.
    """
    inner: Mapping[str, Any] = settings.get("text_config") or {}
    own = {**settings, **inner}
    if own.get("is_encoder_decoder"):
        raise ValueError(f"{name} is an encoder-decoder; only decoder caches are planned")
    kind = str(own.get("model_type") or "")
    n_layers = _first(own, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not n_layers:
        raise ValueError(
            f"{name} does not say how many layers it has (num_hidden_layers); give a decoder's config.json"
        )
    if n_layers > MOST_LAYERS:
        raise ValueError(f"{name} says it has {n_layers:,} layers; no model has more than {MOST_LAYERS:,}")
    types = _layer_types(own, kind, n_layers, name, complete)
    own = {**with_default_window(own, kind, complete)}
    per_layer: Sequence[Mapping[str, Any]] = own.get("per_layer") or [{}] * len(types)
    layers = tuple(
        _layer(t, {**own, **mine}, i, name) for i, (t, mine) in enumerate(zip(types, per_layer, strict=True))
    )
    weights: Mapping[str, Any] | None = own.get("weights")
    return ModelShape(
        name=name,
        architecture=kind or "unknown",
        source=source,
        layers=layers,
        weights=None if weights is None else Weights(**{**_experts(own), **weights}),
        positions=_first(own, *POSITIONS) or None,
        key_bias=bool(own.get("key_bias", _has_key_bias(own, kind))),
        learned_sinks=kind == "gpt_oss",
    )


def _has_key_bias(own: Mapping[str, Any], kind: str) -> bool:
    return kind.startswith("qwen2") or kind in BIASED or any(own.get(name) for name in BIASES)


def _experts(own: Mapping[str, Any]) -> dict[str, int]:
    """How many experts a layer has, and how many of them a token visits."""
    n_experts = _first(own, "num_local_experts", "num_experts", "n_routed_experts")
    n_used = _first(own, "num_experts_per_tok")
    return {"n_experts": n_experts, "n_used": n_used} if n_experts and n_used else {}


def _layer_types(own: Mapping[str, Any], kind: str, n_layers: int, name: str, complete: bool) -> list[str]:
    given: Any = own.get("layer_types")
    if given:
        if unknown := sorted(set(given) - set(KNOWN)):
            raise ValueError(f"{name} has layers of a kind that is not planned: {unknown}; known: {', '.join(KNOWN)}")
        if len(given) != n_layers:
            raise ValueError(f"{name} says the kind of {len(given)} layers (layer_types), and has {n_layers}")
        return list(given)
    if any(key.startswith(("mamba_", "ssm_", "linear_num", "conv_L", "layers_block", "state_size")) for key in own):
        raise ValueError(f"{name} {NEEDS_TRANSFORMERS}")
    if (found := layer_kinds(own, kind, n_layers, complete)) is None:
        raise ValueError(f"{name} (model_type {kind!r}) {NEEDS_TRANSFORMERS}")
    return found


def _layer(layer_type: str, own: Mapping[str, Any], index: int, name: str) -> CacheLayer:
    if layer_type in NOTHING:
        return CacheLayer("shared", note="it reads another layer's cache, or has no attention")
    state, recurrent, note = _state(own) if layer_type in (*STATES, *BOTH) else (0, 0, "")
    if layer_type in STATES:
        return CacheLayer("linear", state=state, recurrent=recurrent, note=note)
    n_query = _each(own, index, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = _first(own, "hidden_size", "n_embd", "d_model")
    if not n_query or not hidden:
        raise ValueError(f"{name} does not say its attention's sizes (num_attention_heads, hidden_size)")
    if layer_type == "full_attention" and (rank := _first(own, "kv_lora_rank")):
        return CacheLayer("latent", 1, n_query, rank, _first(own, "qk_rope_head_dim"), note="one latent for all heads")
    n_kv = _each(own, index, "num_key_value_heads", "num_kv_heads") or (1 if own.get("multi_query") else n_query)
    if n_query % n_kv:
        raise ValueError(
            f"{name} has {n_query} query heads on {n_kv} KV heads in layer {index}; each KV head serves as many"
        )
    width = _each(own, index, "head_dim") or hidden // n_query
    if layer_type == "full_attention":  # Gemma 4 has other heads there
        width = _first(own, "global_head_dim") or width
        n_kv = _first(own, "num_global_key_value_heads") or n_kv
    if layer_type not in SLIDING:
        note = note and "a state beside keys and values: such layers are left exact"
        return CacheLayer("full", n_kv, n_query, width, width, None, state, recurrent, note)
    key = "attention_chunk_size" if layer_type == "chunked_attention" else "sliding_window"
    if not (window := _each(own, index, key)):
        raise ValueError(f"{name} has {layer_type} in layer {index}, but does not say {key}")
    return CacheLayer("sliding", n_kv, n_query, width, width, window, state, recurrent, note)


def _state(own: Mapping[str, Any]) -> tuple[int, int, str]:
    """Numbers of a layer's convolutional and of its recurrent state, and what is to be said of them."""
    get = lambda *names: _first(own, *names)  # noqa: E731
    hidden = get("hidden_size")
    if get("linear_num_value_heads"):  # gated delta rule (Qwen3-Next)
        keys = get("linear_num_key_heads") * get("linear_key_head_dim")
        values = get("linear_num_value_heads") * get("linear_value_head_dim")
        recurrent = values * get("linear_key_head_dim")
        return (2 * keys + values) * get("linear_conv_kernel_dim"), recurrent, "recurrent state"
    if get("conv_L_cache"):  # short convolutions (LFM2)
        return hidden * get("conv_L_cache"), 0, "convolution's state"
    if get("mamba_n_heads", "mamba_num_heads"):  # Mamba 2 beside attention (Falcon-H1, Bamba, Nemotron-H)
        inner = get("mamba_n_heads", "mamba_num_heads") * get("mamba_d_head", "mamba_head_dim")
        width = get("mamba_d_state", "ssm_state_size")
        conv = inner + 2 * get("mamba_n_groups", "n_groups") * width
        return conv * get("mamba_d_conv", "conv_kernel"), inner * width, "recurrent state"
    if get("mamba_d_state"):  # Mamba 1 beside attention (Jamba)
        inner = get("mamba_expand") * hidden
        return inner * get("mamba_d_conv"), inner * get("mamba_d_state"), "recurrent state"
    if get("state_size") and get("intermediate_size"):  # Mamba 1 alone
        inner = get("intermediate_size")
        return inner * get("conv_kernel"), inner * get("state_size"), "recurrent state"
    return 0, 0, "a state of fixed size that is not counted: its settings are not known"


def _first(own: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is a number; 0 if none is."""
    return _each(own, 0, *names)


def _each(own: Mapping[str, Any], index: int, *names: str) -> int:
    """The same of one layer: settings may be lists."""
    for name in names:
        found: Any = own.get(name)
        if isinstance(found, list | tuple) and found:
            items = cast("Sequence[Any]", found)
            found = items[min(index, len(items) - 1)]
        if isinstance(found, int) and not isinstance(found, bool) and found:
            if not 0 < found <= MOST:
                raise ValueError(f"{name}={found:,} counts nothing that a model has; look at its configuration")
            return found
    return 0
