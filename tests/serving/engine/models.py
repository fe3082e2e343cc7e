"""Small models with random weights, written to a folder as an engine loads them, with a tokenizer and a codec each.

Weights are drawn so that a continuation depends on the whole prompt: a model that repeats one token would agree with
itself whatever its cache holds.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from karhunen.calibration.calibrate import calibrate
from karhunen.fitting import fit
from karhunen.recipes import make

VOCABULARY = 512
CALIBRATION_TOKENS = 2048

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    **SIZES, "head_dim": 32, "sliding_window": 200, "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "head_dim": 64}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**SIZES, "hidden_size": 256}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3),
}


def save(family: str, folder: Path, seed: int = 0, std: float = 0.08) -> Path:
    """A model of a family in a folder; `seed` makes another revision of it."""
    config_class, model_class, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(tf, config_class)(**settings)
    model = getattr(tf, model_class)(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """Words `t3` … `t511`, one token each."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )


def words(n_tokens: int, seed: int) -> str:
    """A text of so many tokens."""
    ids = torch.randint(3, VOCABULARY, (n_tokens,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"t{i}" for i in ids.tolist())


def tokens(n_tokens: int, seed: int) -> list[int]:
    """As `words`, as token ids."""
    return [int(word[1:]) for word in words(n_tokens, seed).split()]


def calibrated(model_folder: Path, codec_folder: Path, recipe: str = "int8") -> Path:
    """A codec of the model in a folder."""
    model = tf.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    made = make(recipe)
    text = [words(CALIBRATION_TOKENS, seed=99)]
    fit(made, calibrate(model, text, made.needs(), tokenizer())).save_pretrained(codec_folder)
    return codec_folder
