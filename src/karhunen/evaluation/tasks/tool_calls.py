"""Structured answers: does a tool call, written as JSON, stay the same when its context is coded?

records ─▶ text ─▶ examples of requests and calls ─▶ one more request ─▶ "Call:" ─▶ the model's JSON, dense and coded

What is compared is the parsed object, key by key; a call that the dense model does not write as JSON says nothing.
A needle is one number; here a wrong brace, quote or field shows, which texts and needles do not.
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
from karhunen.evaluation.continuation import Prompt, coded_text, dense_text, read_prompt
from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.evaluation.tasks.haystacks import FIRST, SECOND, essay, fill
from karhunen.hf.probe import text_config

BEGINNING = "Call:"
CITIES = ("Delft", "Lisbon", "Oslo", "Turin", "Ghent", "Porto", "Kyoto", "Quito", "Bergen", "Graz", "Leeds", "Tampa")
MAX_NEW_TOKENS = 56
N_RECORDS = 6
N_EXAMPLES = 4


@final
@dataclass(frozen=True)
class ToolCalls(Task):
    """`n_requests` prompts of about `n_tokens` tokens each."""

    n_requests: int = 8
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
        prompts = [
            _prompt(tokenizer, self.n_tokens, random.Random(f"tool call {seed} {i}"))
            for i in range(min(self.n_requests, limit or self.n_requests))
        ]
        return PreparedToolCalls(model, tokenizer, prompts)


@final
class PreparedToolCalls(Prepared):
    """Prompts as token ids."""

    def __init__(self, model: nn.Module, tokenizer: Any, prompts: Sequence[str]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.tokens: list[Tensor] = [
            torch.tensor(tokenizer(prompt, truncation=False, verbose=False)["input_ids"]) for prompt in prompts
        ]

    @property
    def inputs(self) -> str:
        """Of the token ids."""
        return hashlib.sha256(b"|".join(tokens.numpy().tobytes() for tokens in self.tokens)).hexdigest()[:16]

    def measure(self, codec: Codec) -> dict[str, Any]:
        """Both calls of each prompt, and the share that is the same among those that the dense model writes as JSON."""
        calls: list[dict[str, Any]] = []
        for tokens in self.tokens:
            prompt = read_prompt(self.model, tokens)
            dense = self._call(prompt, dense_text(self.model, prompt, MAX_NEW_TOKENS, self._stop))
            coded = self._call(prompt, coded_text(self.model, codec, prompt, MAX_NEW_TOKENS, self._stop)[0])
            objects = parsed(dense), parsed(coded)
            same = objects[0] is not None and objects[0] == objects[1]
            calls.append({"dense": dense, "coded": coded, "valid": objects[0] is not None, "same": same})
        valid = [call for call in calls if call["valid"]]
        return {
            "metrics": {
                "same": sum(call["same"] for call in valid) / len(valid) if valid else 0.0,
                "dense_valid": len(valid) / len(calls),
                "n_requests": len(calls),
            },
            "calls": calls,
        }

    def _call(self, prompt: Prompt, tokens: list[int]) -> str:
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


def _prompt(tokenizer: Any, n_tokens: int, rng: random.Random) -> str:
    names = rng.sample([f"{a}-{b}" for a in FIRST for b in SECOND], N_RECORDS)
    records = [
        {"id": rng.randrange(1000, 10_000), "name": name, "city": rng.choice(CITIES), "seats": rng.randrange(2, 40)}
        for name in names
    ]
    asked = [rng.choice(records) for _ in range(N_EXAMPLES + 1)]
    table = "\n".join(
        f"{r['name']} has the number {r['id']}, is in {r['city']} and takes {r['seats']}." for r in records
    )
    shown = "\n".join(f"{_request(r)}\nCall: {json.dumps(_call_for(r))}" for r in asked[:-1])
    lines = essay(rng)

    def make(n: int) -> str:
        text = "\n".join(lines[:n])
        return (
            f"{table}\n\n{text}\n\nEach request becomes a call, as JSON.\n{shown}\n{_request(asked[-1])}\n{BEGINNING}"
        )

    return fill(tokenizer, n_tokens, make, len(lines))


def _request(record: dict[str, Any]) -> str:
    return f"Request: book {record['name']} for everyone it takes."


def _call_for(record: dict[str, Any]) -> dict[str, Any]:
    return {"tool": "book", "id": record["id"], "city": record["city"], "seats": record["seats"], "confirm": True}
