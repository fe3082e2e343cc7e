"""What it takes a model to read a text, measured on the beginning of it after a first call that is not counted.

seconds(text) ≈ tokens · min(seconds of a second read of the first n tokens) / n,    n ≤ 256, as far as the budget goes

Attention takes more time for each further token, so of a long text this is less than what reading it takes. What a
first call does besides (compiling, loading weights from disk) is left out.
"""

from time import perf_counter

from jaxtyping import Int
from torch import Tensor, nn

from karhunen.hf.cache import dense_cache
from karhunen.hf.probe import forward, inference

FEW_TOKENS, MANY_TOKENS = 16, 256
BUDGET_SECONDS = 1.0


def reading_seconds(model: nn.Module, tokens: Int[Tensor, "1 t"], budget: float = BUDGET_SECONDS) -> float:
    """Seconds that reading `tokens` takes, about; measuring takes about `budget` seconds, or reads of 16 tokens."""
    n_tokens = tokens.shape[1]
    n = min(n_tokens, FEW_TOKENS)
    if not n:
        return 0.0
    _read(model, tokens[:, :n])
    per_token = _read(model, tokens[:, :n]) / n
    most = min(n_tokens, MANY_TOKENS, int(budget / max(per_token, 1e-9) / 2))
    if most > n:
        _read(model, tokens[:, :most])
        per_token = _read(model, tokens[:, :most]) / most
    return n_tokens * per_token


def _read(model: nn.Module, tokens: Tensor) -> float:
    with inference(model):
        start = perf_counter()
        logits: Tensor = forward(model, dense_cache(model), tokens).logits
        _ = float(logits[0, -1, 0])  # waits for a device that works behind
        return perf_counter() - start
