"""What a model says next, greedily, from a dense cache that was read once or from its coded copy.

prompt ─▶ dense prefill (once) ─┬─▶ copy ─▶ greedy tokens: the dense text
                                └─▶ coded copy ─▶ greedy tokens: compared with the dense text

What the coded copy says is often what the dense model said: given that as a guess, it is read at once, not in steps.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.evaluation.scores.leads import leads
from karhunen.evaluation.scores.metrics import rouge_l, tokens_until_divergence
from karhunen.evaluation.scores.score import coded_copy
from karhunen.hf.cache import dense_cache
from karhunen.hf.probe import cache_argument, inference
from karhunen.store.report import Report


@final
@dataclass(frozen=True)
class Prompt:
    """A prompt that the dense model has read: the cache after it, and its likeliest next token."""

    tokens: Int[Tensor, " n"]
    cache: Any
    first: int


@final
@dataclass(frozen=True)
class Agreement:
    """A coded continuation beside the dense one."""

    n_tokens: int
    until_divergence: int
    rouge_l: float


def read_prompt(model: nn.Module, tokens: Int[Tensor, " n"]) -> Prompt:
    """Read the prompt with an exact cache."""
    with inference(model):
        cache = dense_cache(model)
        return Prompt(tokens, cache, _next(model, tokens, cache))


def dense_text(model: nn.Module, prompt: Prompt, n_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """The dense model's greedy continuation; the prompt's cache is left as it was."""
    with inference(model):
        return _greedy(model, deepcopy(prompt.cache), prompt.first, n_tokens, stop)


def coded_text(
    model: nn.Module,
    codec: Codec,
    prompt: Prompt,
    n_tokens: int,
    stop: Sequence[int] = (),
    guess: Sequence[int] = (),
) -> tuple[list[int], Report]:
    """The greedy continuation that reads the coded prompt, and what the cache held. `guess`: a whole continuation that
    it may be; if it is another, guessing costs one read."""
    with inference(model):
        cache = coded_copy(model, codec, prompt.tokens, prompt.cache)
        tokens = list(guess)
        if not tokens or tokens[0] != prompt.first or not _says(model, cache, tokens):
            if tokens:
                cache.close()
                cache = coded_copy(model, codec, prompt.tokens, prompt.cache)
            tokens = _greedy(model, cache, prompt.first, n_tokens, stop)
        report = cache.report()
        cache.close()
        return tokens, report


def leaves_at(model: nn.Module, codec: Codec, prompt: Prompt, said: Sequence[int]) -> int | None:
    """The first token of `said`, the dense model's greedy continuation, that greedy decoding from the coded prompt does
    not choose; None if it says all of it. The text is read, not generated."""
    with inference(model):
        cache = coded_copy(model, codec, prompt.tokens, prompt.cache)
        found = _leaves(model, cache, said)
        cache.close()
        return found


def agreement(dense: Sequence[int], coded: Sequence[int]) -> Agreement:
    """Compare two continuations."""
    return Agreement(len(dense), tokens_until_divergence(dense, coded), rouge_l(dense, coded))


def stop_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: those of the model's generation settings, and the tokenizer's."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = named if isinstance(named, list) else [named]
    return tuple(i for i in dict.fromkeys([*found, tokenizer.eos_token_id]) if i is not None)


def _says(model: nn.Module, cache: Any, tokens: Sequence[int]) -> bool:
    return _leaves(model, cache, tokens) is None


def _leaves(model: nn.Module, cache: Any, tokens: Sequence[int]) -> int | None:
    """Which of `tokens` after the first greedy decoding does not choose; a cache that has read the prompt reads all but
    the last."""
    given = torch.tensor(tokens, device=HOST)
    if len(given) < 2:
        return None
    before = _logits(model, given[:1], cache)[-1]
    wrong = (leads(model, cache, before, given[1:])[0] <= 0).nonzero().flatten().tolist()
    return 1 + wrong[0] if wrong else None


def _greedy(model: nn.Module, cache: Any, first: int, n_tokens: int, stop: Sequence[int]) -> list[int]:
    tokens = [first]
    while len(tokens) < n_tokens and tokens[-1] not in stop:
        tokens.append(_next(model, torch.tensor(tokens[-1:], device=HOST), cache))
    return tokens


def _next(model: nn.Module, tokens: Int[Tensor, " n"], cache: Any) -> int:
    return int(_logits(model, tokens, cache)[-1].argmax())


def _logits(model: nn.Module, tokens: Int[Tensor, " n"], cache: Any) -> Float[Tensor, "_ v"]:
    device = next(model.parameters()).device
    arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    return cast("Any", model)(input_ids=tokens[None].to(device), **arguments).logits[0]
