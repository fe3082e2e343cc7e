"""A GGUF file becomes a folder that transformers loads in a second: dense bfloat16 safetensors and a tokenizer."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from karhunen.hf.model_sources import ModelSource


def convert(source: ModelSource, gguf: Path, into: Path) -> None:
    """Save the GGUF's model as dense bfloat16 safetensors, and its tokenizer, so that a reload takes a second."""
    import transformers

    # Releases that can keep weights packed have a config to say no; older ones always dequantize.
    packed = getattr(transformers, "GgufConfig", None)
    dense = {"quantization_config": packed(dequantize=True)} if packed is not None else {}
    # The GGUF reader's progress bar knows no switch; a failure raises, so nothing of worth is on stderr.
    with silent_transformers(), redirect_stderr(io.StringIO()):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True, **dense
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True
        )
        # The dense model is a plain one: without this, save_pretrained refuses it as a quantized one.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        # What was derived while loading is not the model's identity: a path, a working title, an origin flag.
        model.config._name_or_path = model.name_or_path = source.description
        model.config.__dict__.pop("_model_name_or_path", None)
        model.generation_config._from_model_config = False
        _mend_tokenizer(source, tokenizer, model.config.max_position_embeddings)
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)


def _mend_tokenizer(source: ModelSource, tokenizer: Any, n_context_tokens: int) -> None:
    """Put back what GGUF does not carry: the digit split, the context length, and padding fit for generation."""
    from tokenizers import pre_tokenizers

    tokenizer.model_max_length = n_context_tokens
    tokenizer.padding_side = "left"
    for of_this_load in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(of_this_load, None)
    tokenizer.init_kwargs.update(model_max_length=n_context_tokens, padding_side="left")
    if source.splits_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


@contextmanager
def silent_transformers() -> Iterator[None]:
    """No progress bars, no advice, no count of attempts from transformers and its hub inside; errors still raise, and
    their settings come back after."""
    from transformers.utils import logging

    hub = getLogger("huggingface_hub")
    verbosity, had_bars, of_hub = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.setLevel(ERROR)
    try:
        yield
    finally:
        hub.setLevel(of_hub)
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
