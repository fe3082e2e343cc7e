"""A decode step of a random Llama from its compressed cache, for `gpu_check.py`: needs transformers, and no file.

prompt ─ calibrate, fit ─▶ codec ─▶ a cache that holds the prompt ─▶ one token, then forgotten again
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from karhunen.calibration.calibrate import calibrate
from karhunen.fitting import fit
from karhunen.hf.attention import enable
from karhunen.hf.cache import CompressedCache
from karhunen.recipe import Side
from karhunen.recipes import make
from karhunen.windows.sink_recent import SinkRecent


@dataclass(frozen=True)
class Step:
    """A model, what it has read, and the token that comes next."""

    model: Any
    held: CompressedCache
    token: Tensor

    @classmethod
    def of(cls, small: bool, device: torch.device) -> "Step":
        """Prompts of 60 or 4096 tokens; a model of two or eight layers, in bfloat16 on a GPU."""
        from transformers import LlamaConfig, LlamaForCausalLM

        width, layers, heads, n = (48, 2, 4, 60) if small else (1024, 8, 16, 4096)
        config = LlamaConfig(
            vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=max(2 * n, 1024),
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval().to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        recipe = make("karhunen")
        assert recipe.key is not None and recipe.value is not None, "karhunen codes both sides"
        window = SinkRecent(sink=4, recent=20, page_tokens=8) if small else recipe.window
        recipe = replace(recipe, key=_untrained(recipe.key), value=_untrained(recipe.value), window=window)
        text = torch.randint(3, 512, (max(n, 400),)).tolist()
        with torch.inference_mode(False):
            codec = fit(recipe, calibrate(model, [text], recipe.needs(), min_tokens=16))
        enable(model)
        held = CompressedCache(model, codec)
        model(input_ids=torch.tensor([text[: n - 1]], device=device), past_key_values=held, use_cache=True)
        return cls(model, held, torch.tensor([[text[n - 1]]], device=device))

    def run(self) -> None:
        """The token is read and forgotten."""
        self.model(input_ids=self.token, past_key_values=self.held, use_cache=True)
        self.held.crop(-1)

    def how_read(self) -> str:
        """By which path each layer's coded tokens were."""
        return ", ".join(sorted({row.how_read for row in self.held.report().layers}))


def _untrained(side: Side) -> Side:
    """Tables of one round of k-means: speed does not depend on them."""
    quantizer: Any = side.quantizer
    return replace(side, quantizer=replace(quantizer, n_iterations=1)) if hasattr(quantizer, "n_iterations") else side
