"""Random-weight models of many families, small enough for a forward in milliseconds."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

Make = Callable[[], Any]

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def build(family: str, **changes: Any) -> Any:
    """A model of a family in float32 evaluation mode, the same weights at every call."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(tf, kind[0])(**{**settings, **changes})
    model = getattr(tf, kind[1])(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


_LLAMA = ("LlamaConfig", "LlamaForCausalLM")
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA3 = {
    **SIZES, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_MLA = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_GPT2 = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512}

FAMILIES: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "llama": (_LLAMA, SIZES),
    "llama_yarn": (_LLAMA, {**SIZES, **_rope("yarn", factor=4.0, original_max_position_embeddings=128)}),
    "llama_llama3": (_LLAMA, {**SIZES, **_rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)}),
    "llama_dynamic": (_LLAMA, {**SIZES, **_rope("dynamic", factor=2.0)}),
    "llama_linear": (_LLAMA, {**SIZES, **_rope("linear", factor=4.0)}),
    "qwen2": (("Qwen2Config", "Qwen2ForCausalLM"), SIZES),
    "qwen3": (("Qwen3Config", "Qwen3ForCausalLM"), {**SIZES, "head_dim": 16}),
    "gemma3": (("Gemma3TextConfig", "Gemma3ForCausalLM"), _GEMMA3),
    "gemma2": (("Gemma2Config", "Gemma2ForCausalLM"), {**SIZES, "head_dim": 16, "sliding_window": 16}),
    "phi": (("PhiConfig", "PhiForCausalLM"), {**SIZES, "num_key_value_heads": 4, "hidden_size": 64}),
    "phi3": (("Phi3Config", "Phi3ForCausalLM"), {**SIZES, "pad_token_id": 0}),
    "gpt_neox": (("GPTNeoXConfig", "GPTNeoXForCausalLM"), {**SIZES, "hidden_size": 64}),
    "gptj": (("GPTJConfig", "GPTJForCausalLM"), {**_GPT2, "n_embd": 64, "rotary_dim": 8}),
    "cohere": (("CohereConfig", "CohereForCausalLM"), SIZES),
    "glm": (("GlmConfig", "GlmForCausalLM"), {**SIZES, "head_dim": 16, "pad_token_id": 0}),
    "mla": (("DeepseekV3Config", "DeepseekV3ForCausalLM"), _MLA),
    "gpt2": (("GPT2Config", "GPT2LMHeadModel"), _GPT2),
    "bloom": (("BloomConfig", "BloomForCausalLM"), {"vocab_size": 99, "hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "opt": (("OPTConfig", "OPTForCausalLM"), {
        "vocab_size": 99, "hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 512, "word_embed_proj_dim": 48}),
    "smollm3": (("SmolLM3Config", "SmolLM3ForCausalLM"), {**SIZES, "num_hidden_layers": 4, "pad_token_id": 0}),
    "gpt_oss": (("GptOssConfig", "GptOssForCausalLM"), {
        **SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "mistral": (("MistralConfig", "MistralForCausalLM"), {**SIZES, "sliding_window": 16}),
    "lfm2": (("Lfm2Config", "Lfm2ForCausalLM"), {**SIZES, "layer_types": ["conv", "full_attention"]}),
    "mamba": (("MambaConfig", "MambaForCausalLM"), {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}),
    "falcon_h1": (("FalconH1Config", "FalconH1ForCausalLM"), {
        **SIZES, "head_dim": 16, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16,
        "mamba_n_groups": 1}),
    "qwen3_next": (("Qwen3NextConfig", "Qwen3NextForCausalLM"), {
        **SIZES, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "gemma3n": (("Gemma3nTextConfig", "Gemma3nForCausalLM"), {
        **SIZES, "num_hidden_layers": 4, "head_dim": 16, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 99,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4, "intermediate_size": [64] * 4, "sliding_window": 16,
        "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
    "gemma4": (("Gemma4TextConfig", "Gemma4ForCausalLM"), {
        **SIZES, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
    "llama4": (("Llama4TextConfig", "Llama4ForCausalLM"), {
        **SIZES, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2,
        "pad_token_id": 0}),
    "nanochat": (("NanoChatConfig", "NanoChatForCausalLM"), SIZES),
    "stablelm": (("StableLmConfig", "StableLmForCausalLM"), {**SIZES, "hidden_size": 64}),
}  # fmt: skip
