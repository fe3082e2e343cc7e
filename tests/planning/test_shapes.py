"""Planned bytes are those of real caches: of every family that the tests build, and of every model of the table."""

from typing import Any

import pytest
import torch
import transformers as tf
from tests.hf.tiny import FAMILIES, build

from karhunen.hf.cache import dense_cache
from karhunen.hf.gguf import silent_transformers
from karhunen.hf.probe import cache_argument
from karhunen.hf.settings import settings_of
from karhunen.planning import table
from karhunen.planning.reading import read_shape
from karhunen.planning.shape import ModelShape

N_TOKENS = 24
# Parameters of the decoders in billions, as their model cards give them.
PUBLISHED = {
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.3-70b": 70.6,
    "llama-3.1-405b": 406, "smollm2": 0.135, "mistral-7b": 7.25, "mistral-nemo-12b": 12.2, "mixtral-8x7b": 46.7,
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6, "qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-14b": 14.8,
    "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "qwen3-next-80b-a3b": 80, "gemma3-270m": 0.268,
    "gemma3-1b": 1.0, "gemma3-4b": 3.88, "gemma3-12b": 11.8, "gemma3-27b": 27.0, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 117, "deepseek-v2-lite": 15.7, "deepseek-v3": 671, "phi-4": 14.7, "phi-4-mini": 3.84,
}  # fmt: skip
# And those that one token visits, of models with experts.
ACTIVE = {
    "mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "qwen3-next-80b-a3b": 3.9, "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1, "deepseek-v2-lite": 2.66, "deepseek-v3": 37,
}  # fmt: skip


def real_bytes(model: Any, n_tokens: int) -> int:
    """Of everything that transformers' own cache holds after a forward of one sequence."""
    cache = dense_cache(model)
    with torch.no_grad(), silent_transformers():
        model(input_ids=torch.arange(n_tokens)[None] % 90 + 3, use_cache=True, **{cache_argument(model): cache})
    held = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for value in held for x in (value.values() if isinstance(value, dict) else [value])]
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor) and x.ndim > 1)


def beyond_window(shape: ModelShape, n_tokens: int, bits: float) -> float:
    """transformers keeps a window without the token that is being read, which the plan counts."""
    full = [layer for layer in shape.layers if layer.window_tokens is not None and layer.window_tokens <= n_tokens]
    return sum(layer.elements_per_token for layer in full) * bits / 8


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_is_planned_to_the_byte(family: str, tmp_path: Any) -> None:
    model = build(family)
    model.config.save_pretrained(tmp_path)
    settings, source = settings_of(tmp_path)
    shape = read_shape(settings, family, source)
    planned = shape.dense_bytes(N_TOKENS, 32) - beyond_window(shape, N_TOKENS, 32)
    assert planned == real_bytes(model, N_TOKENS)
    assert shape.weights is not None
    assert shape.weights.n_parameters == sum(p.numel() for p in model.parameters())
    assert shape.key_bias == any("k_proj.bias" in n or "qkv" in n or "query_key" in n or "c_attn.bias" in n
                                 for n, _ in model.named_parameters() if n.endswith("bias"))  # fmt: skip


def on_meta(config: dict[str, Any], **changes: Any) -> Any:
    """The model of a table's entry without data; everything that does not reach the cache may be changed."""
    settings = {"pad_token_id": 0, **config, **changes}
    with torch.device("meta"), silent_transformers():
        chosen = tf.AutoConfig.for_model(settings.pop("model_type"), **settings)
        return tf.AutoModelForCausalLM.from_config(chosen, dtype=torch.bfloat16)


SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 2,
         "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "q_lora_rank": 16,
         "shared_expert_intermediate_size": 16}  # fmt: skip


@pytest.mark.parametrize("name", table.names())
def test_a_model_of_the_table_caches_what_is_planned(name: str) -> None:
    """Its own layers and cached sizes; hidden states, experts and query heads are few, so that it fits in a test."""
    (entry,) = (entry for entry in table.entries() if entry["name"] == name)
    config = entry["config"]
    few = {key: value for key, value in SMALL.items() if config.get(key) is not None}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    n_heads = config["num_key_value_heads"]
    own = {"num_attention_heads": n_heads, "head_dim": head_dim, "hidden_size": 16 * n_heads}
    if "kv_lora_rank" in config:
        own = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1}
    settings = {"pad_token_id": 0, **config, **few, **own}
    with silent_transformers():
        chosen = tf.AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = tf.AutoModelForCausalLM.from_config(chosen, dtype=torch.bfloat16).eval()
    shape = table.find(name)
    assert shape is not None
    planned = shape.dense_bytes(N_TOKENS) - beyond_window(shape, N_TOKENS, 16)
    assert planned == real_bytes(model, N_TOKENS)


@pytest.mark.parametrize("name", table.names())
def test_a_model_of_the_table_has_the_weights_that_its_card_says(name: str) -> None:
    (entry,) = (entry for entry in table.entries() if entry["name"] == name)
    model, shape = on_meta(entry["config"]), table.find(name)
    model.tie_weights()
    assert shape is not None
    assert shape.weights is not None
    assert shape.weights.n_parameters == sum(p.numel() for p in model.parameters())
    assert shape.weights.n_expert == sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert shape.weights.n_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    if name in ACTIVE:
        looked_up = 0 if name.startswith("gpt-oss") else shape.weights.n_looked_up  # whose card leaves it out
        read = shape.weights.read_bytes(1, 8) + looked_up
        assert read / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)
    else:
        assert shape.weights.n_expert == 0


def test_every_model_of_the_table_has_a_public_source_and_one_name() -> None:
    assert sorted(PUBLISHED) == sorted(table.names())
    for entry in table.entries():
        assert entry["source"] == f"https://huggingface.co/{entry['id']}/blob/main/config.json"
        assert table.find(entry["id"]) == table.find(entry["name"].upper().replace("-", "_")) is not None
    assert table.find("llama") is None


def test_read_without_transformers_a_table_entry_is_the_shape_that_transformers_reads(tmp_path: Any) -> None:
    for name in ("gemma3-1b", "gpt-oss-20b", "qwen2.5-0.5b", "phi-4-mini", "deepseek-v2-lite", "qwen3-next-80b-a3b"):
        (entry,) = (entry for entry in table.entries() if entry["name"] == name)
        on_meta(entry["config"]).config.save_pretrained(tmp_path)
        shape, plain = read_shape(settings_of(tmp_path)[0], name, ""), table.find(name)
        assert plain is not None
        assert plain.alike == shape.alike
        assert (plain.positions, plain.key_bias, plain.learned_sinks) == (
            shape.positions, shape.key_bias, shape.learned_sinks)  # fmt: skip
        assert plain.weights is not None
        assert shape.weights is not None
        assert plain.weights.n_parameters == shape.weights.n_parameters
        assert plain.weights.n_looked_up == shape.weights.n_looked_up
        assert (plain.weights.n_experts, plain.weights.n_used) == (shape.weights.n_experts, shape.weights.n_used)


SIZES = {"model_type": "x", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "x"}, "how many layers"),
        ({**SIZES, "num_attention_heads": None}, "attention's sizes"),
        ({**SIZES, "layer_types": ["full_attention", "rnn"] * 2}, r"not planned: \['rnn'\]"),
        ({**SIZES, "mamba_d_state": 16}, "read through transformers only"),
        ({**SIZES, "layer_types": ["sliding_attention"] * 4}, "does not say sliding_window"),
        ({**SIZES, "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_cannot_be_read_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_shape(settings, "a model", "")


def test_layers_that_karhunen_leaves_exact_are_not_planned_as_coded(tmp_path: Any) -> None:
    """What `describe` says of the model itself: a full layer with a state beside it is no full layer there."""
    from karhunen.hf.describe import describe

    for family in ("falcon_h1", "qwen3_next", "gemma3", "mla", "gemma4"):
        model = build(family)
        model.config.save_pretrained(tmp_path / family)
        shape = read_shape(settings_of(tmp_path / family)[0], family, "")
        assert [layer.codable for layer in shape.layers] == [x.kind == "full" for x in describe(model).layers], family


def test_windows_are_read_where_layer_types_are_not_said() -> None:
    every = read_shape({**SIZES, "sliding_window": 16}, "mistral", "")
    assert [layer.kind for layer in every.layers] == ["sliding"] * 4
    off = read_shape({**SIZES, "sliding_window": 16, "use_sliding_window": False}, "qwen", "")
    assert [layer.kind for layer in off.layers] == ["full"] * 4
    some = read_shape({**SIZES, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, "qwen", "")
    assert [layer.kind for layer in some.layers] == ["full"] * 3 + ["sliding"]
    pattern = read_shape({**SIZES, "model_type": "gemma2", "sliding_window": 16}, "gemma", "")
    assert [layer.kind for layer in pattern.layers] == ["sliding", "full"] * 2
