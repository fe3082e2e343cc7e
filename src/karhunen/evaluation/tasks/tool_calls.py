"""Structured answers: does a tool call, written as JSON, stay the same when its context is coded?

examples of requests and calls ─▶ text ─▶ one more request ─▶ "Call:" ─▶ the model's JSON, dense and coded

The form of a call lies far back, where tokens are coded; a wrong brace, quote, key or field shows, which texts and
needles do not. Compared is the parsed object with the call that was asked for, among those the dense model gets right.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.evaluation.continuation import coded_text, dense_text, read_prompt
from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.evaluation.tasks.haystacks import essay, fill
from karhunen.hf.probe import text_config

BEGINNING = "Call:"
CITIES = ("Delft", "Rome", "Oslo", "Turin", "Ghent", "Paris", "Kyoto", "Quito", "Bergen", "Vienna", "Leeds", "Berlin")
MAX_NEW_TOKENS = 56
N_EXAMPLES = 4


@final
@dataclass(frozen=True)
class ToolCalls(Task):
    """`n_requests` prompts of about `n_tokens` tokens each."""

    n_requests: int = 16
    n_tokens: int = 1024

    @property
    def name(self) -> str:
        """The same for all sizes."""
        return "tool_calls"

    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> "PreparedToolCalls":
        """Make the prompts; ValueError if they do not fit the model."""
        room = getattr(text_config(model), "max_position_embeddings", None)
        if room is not None and self.n_tokens + MAX_NEW_TOKENS > room:
            raise ValueError(f"tool calls after {self.n_tokens} tokens do not fit the model's {room} positions")
        asked = [
            _asked(tokenizer, self.n_tokens, random.Random(f"tool call {seed} {i}"))
            for i in range(min(self.n_requests, limit or self.n_requests))
        ]
        return PreparedToolCalls(model, tokenizer, asked)


@final
class PreparedToolCalls(Prepared):
    """Prompts as token ids, and the call that each asks for."""

    def __init__(self, model: nn.Module, tokenizer: Any, asked: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.wanted = [call for _, call in asked]
        self.tokens: list[Tensor] = [
            torch.tensor(tokenizer(prompt, truncation=False, verbose=False)["input_ids"], device=HOST)
            for prompt, _ in asked
        ]

    @property
    def inputs(self) -> str:
        """Of the token ids."""
        return hashlib.sha256(b"|".join(tokens.numpy().tobytes() for tokens in self.tokens)).hexdigest()[:16]

    def measure(self, codec: Codec) -> dict[str, Any]:
        """Both calls of each prompt; `same` is the share of the dense model's right calls that stay right."""
        calls: list[dict[str, Any]] = []
        for tokens, wanted in zip(self.tokens, self.wanted, strict=True):
            prompt = read_prompt(self.model, tokens)
            dense = self._call(dense_text(self.model, prompt, MAX_NEW_TOKENS, self._stop))
            coded = self._call(coded_text(self.model, codec, prompt, MAX_NEW_TOKENS, self._stop)[0])
            right = {"dense_right": parsed(dense) == wanted, "coded_right": parsed(coded) == wanted}
            calls.append({"wanted": wanted, "dense": dense, "coded": coded, **right})
        known = [call for call in calls if call["dense_right"]]
        return {
            "metrics": {
                "same": sum(call["coded_right"] for call in known) / len(known) if known else 0.0,
                "dense_right": len(known) / len(calls),
                "n_requests": len(calls),
            },
            "calls": calls,
        }

    def _call(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip().partition("\n")[0]

    @property
    def _stop(self) -> tuple[int, ...]:
        return tuple(self.tokenizer("\n", add_special_tokens=False)["input_ids"][-1:])


def parsed(call: str) -> dict[str, Any] | None:
    """The object that a line begins with, or None if it begins with none."""
    try:
        found, _ = json.JSONDecoder().raw_decode(call)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _asked(tokenizer: Any, n_tokens: int, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A prompt of about `n_tokens` tokens, and the call it asks for."""
    calls = [
        {
            "tool": "book",
            "id": rng.randrange(1000, 10_000),
            "city": rng.choice(CITIES),
            "seats": rng.randrange(2, 40),
            "confirm": True,
        }
        for _ in range(N_EXAMPLES + 1)
    ]
    shown = "\n".join(f"{_request(call)}\n{BEGINNING} {json.dumps(call)}" for call in calls[:-1])
    lines = essay(rng)

    def make(n: int) -> str:
        text = "\n".join(lines[:n])
        return f"Each request becomes a call, as JSON.\n{shown}\n\n{text}\n\n{_request(calls[-1])}\n{BEGINNING}"

    return fill(tokenizer, n_tokens, make, len(lines)), calls[-1]


def _request(call: dict[str, Any]) -> str:
    return f"Request: book number {call['id']} in {call['city']} for {call['seats']} people."
