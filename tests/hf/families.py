"""Models of every family in the table of docs/reliability.md: random weights, biases and norms, sizes of a few dozen.

Norms and biases count: with their usual ones and zeros a key before its norm and one behind it look much the same. Of
mixtures every expert takes part: another choice of experts is a jump, however small the error that made it.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from tests.hf.tiny import SIZES, build

SPIKE = 30.0  # times the usual length of a key, in one coordinate


def _llama(**changes: Any) -> Callable[[], Any]:
    return lambda: build("llama", **{"num_attention_heads": 4, "num_key_value_heads": 2, **changes})


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def _made(config: str, model: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        return getattr(tf, model)(getattr(tf, config)(**settings))

    return make


def _qwen2_spikes() -> Any:
    return build("qwen2")


def _with_biases(family: str, **changes: Any) -> Callable[[], Any]:
    return lambda: build(family, **changes)


_SHORT = {"original_max_position_embeddings": 512}
_MLA = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
_VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}

MODELS: dict[str, Callable[[], Any]] = {
    **{f"Llama, heads of {d}": _llama(head_dim=d, num_attention_heads=2, num_key_value_heads=1)
       for d in (64, 80, 96, 112, 128, 192, 256, 512)},
    "Llama, one KV head for each": _llama(num_key_value_heads=4),
    "Llama, 7 heads on one": _llama(hidden_size=84, num_attention_heads=7, num_key_value_heads=1),
    "Llama, biases": _llama(attention_bias=True, mlp_bias=True),
    "Llama, RoPE yarn": _llama(**_rope("yarn", factor=4.0, **_SHORT), max_position_embeddings=2048),
    "Llama, RoPE llama3": _llama(**_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_SHORT),
                                 max_position_embeddings=2048),
    "Llama, RoPE dynamic": _llama(**_rope("dynamic", factor=2.0)),
    "Llama, RoPE linear": _llama(**_rope("linear", factor=4.0)),
    "Llama, RoPE longrope": _llama(**_rope("longrope", factor=4.0, short_factor=[1.0] * 6, long_factor=[2.0] * 6,
                                           **_SHORT), max_position_embeddings=2048),
    "Qwen2, spikes in the key bias": _qwen2_spikes,
    "Qwen3": _with_biases("qwen3", attention_bias=True),
    "Mistral": lambda: build("mistral", sliding_window=None),
    "Mistral, sliding": _with_biases("mistral"),
    "Mixtral": _made("MixtralConfig", "MixtralForCausalLM", **SIZES, num_local_experts=4,
                     num_experts_per_tok=4),
    "Phi": _with_biases("phi"),
    "Phi 3": _with_biases("phi3"),
    "GPT-NeoX": _with_biases("gpt_neox"),
    "GPT-J": _with_biases("gptj"),
    "GPT-2": _with_biases("gpt2"),
    "OPT": _with_biases("opt"),
    "Bloom": _with_biases("bloom"),
    "MPT": _made("MptConfig", "MptForCausalLM", d_model=48, n_heads=4, n_layers=2, vocab_size=99, max_seq_len=512),
    "Falcon": _made("FalconConfig", "FalconForCausalLM", vocab_size=99, hidden_size=48, num_hidden_layers=2,
                    num_attention_heads=4, alibi=False, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "Falcon, ALiBi": _made("FalconConfig", "FalconForCausalLM", vocab_size=99, hidden_size=48, num_hidden_layers=2,
                           num_attention_heads=4, alibi=True, new_decoder_architecture=False, multi_query=False),
    "StableLM": _with_biases("stablelm", use_qkv_bias=True),
    "Gemma 2": _with_biases("gemma2", num_hidden_layers=2,
                            layer_types=["sliding_attention", "full_attention"], attn_logit_softcapping=5.0),
    "Gemma 3": _with_biases("gemma3"),
    "Gemma 3n": _with_biases("gemma3n"),
    "Gemma 4": _with_biases("gemma4"),
    "gpt-oss": _with_biases("gpt_oss", num_experts_per_tok=4),
    "Cohere": _with_biases("cohere", attention_bias=True),
    "Cohere 2": _made("Cohere2Config", "Cohere2ForCausalLM", **SIZES, sliding_window=16, bos_token_id=1,
                      eos_token_id=2, layer_types=["sliding_attention", "full_attention"]),
    "Llama 4": _with_biases("llama4", num_experts_per_tok=2),
    "Exaone 4": _made("Exaone4Config", "Exaone4ForCausalLM", **SIZES, sliding_window=16,
                      layer_types=["sliding_attention", "full_attention"]),
    "SmolLM3": _with_biases("smollm3"),
    "GLM": _with_biases("glm"),
    "OLMo 2": _made("Olmo2Config", "Olmo2ForCausalLM", **SIZES, pad_token_id=0),
    "Granite": _made("GraniteConfig", "GraniteForCausalLM", **SIZES, attention_multiplier=0.2, residual_multiplier=0.5),
    "nanochat": _with_biases("nanochat"),
    "Qwen3-Next": _with_biases("qwen3_next", num_experts_per_tok=4),
    "LFM2": _with_biases("lfm2"),
    "Falcon-H1": _with_biases("falcon_h1"),
    "Jamba": _made("JambaConfig", "JambaForCausalLM", **SIZES, attn_layer_period=2, attn_layer_offset=1,
                   expert_layer_period=2, expert_layer_offset=1, num_experts=2, num_experts_per_tok=2,
                   mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False, pad_token_id=0),
    "Granite hybrid": _made("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", **SIZES, **_HYBRID,
                            num_local_experts=0, layer_types=["mamba", "attention"], shared_intermediate_size=64),
    "DeepSeek V2": _made("DeepseekV2Config", "DeepseekV2ForCausalLM", **_MLA, **_EXPERTS),
    "DeepSeek V3": _with_biases("mla", num_experts_per_tok=4),
    "MiniCPM3": _made("MiniCPM3Config", "MiniCPM3ForCausalLM", **{**_MLA, "q_lora_rank": 24}),
    "Qwen2-VL": _made("Qwen2VLConfig", "Qwen2VLForConditionalGeneration",
                      text_config={**SIZES, "rope_parameters": _MROPE}, vision_config=_VISION),
    "Mamba": _with_biases("mamba"),
}  # fmt: skip


def model_of(name: str) -> Any:
    """In float32, in evaluation mode, with gradients off; the same weights at every call."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(0.2 * noise)
            elif not any(part in path for part in ("A_log", "dt_", ".D", "conv")):  # of recurrences: they would blow up
                parameter.copy_((parameter.float().mean() + 0.3 * noise).to(parameter.dtype))
        if "spikes" in name:
            for layer in (model.model.layers[0], model.model.layers[-1]):
                bias = layer.self_attn.k_proj.bias
                bias[5] = SPIKE * bias.std()
    return model.eval()
