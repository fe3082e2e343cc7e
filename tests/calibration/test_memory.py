"""What the arithmetic of memory says, against worked examples and against an allocator's record."""

from typing import Any

import pytest
import torch
from tests.allocations import peak_bytes
from tests.hf.tiny import build

from karhunen import recipes
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.memory import Work, memory_of
from karhunen.hf.describe import identity_of
from karhunen.hf.sizes import sizes_of

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3": {"hidden_size": 160, "intermediate_size": 512, "head_dim": 64},
}
T = 384


def held(family: str, recipe: str, vocabulary: int, batch: int, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Bytes that the arithmetic says, and bytes that calibration was seen to hold beside the weights."""
    model = build(family, vocab_size=vocabulary, **SHAPES[family]).to(dtype)
    tokens = torch.randint(1, vocabulary, (2 * batch, T), generator=torch.Generator().manual_seed(0))
    needs = tuple(recipes.make(recipe).needs())
    identity_of(model)
    seen = peak_bytes(lambda: calibrate(model, tokens, needs, sequence_tokens=T, batch=batch))
    sizes = sizes_of(model)
    (host,) = memory_of(sizes, Work(needs, sizes.full_layers, tokens.numel(), T, batch))
    return host.working, seen


@pytest.mark.parametrize("recipe", ["karhunen", "nova_kv", "spectra"])
@pytest.mark.parametrize(("vocabulary", "batch"), [(300, 1), (300, 4), (20000, 1)])
@pytest.mark.parametrize("family", SHAPES)
def test_the_arithmetic_says_what_an_allocator_sees(family: str, vocabulary: int, batch: int, recipe: str) -> None:
    said, seen = held(family, recipe, vocabulary, batch)
    assert 0.7 * said <= seen <= 1.1 * said, f"{seen / said:.2f} of {said:,} bytes"
