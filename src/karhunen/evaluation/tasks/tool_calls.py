"""Structured answers: does a tool call, written as JSON, stay the same when its context is coded?

examples of requests and calls ─▶ text ┬─▶ a request ─▶ "Call:" ─▶ the call asked for, token by token, dense and coded
                                       └─▶ another …    (the text is read once for `n_each` requests)

The form of a call lies far back, where tokens are coded; a wrong brace, quote, key or field shows, which texts and
needles do not. A call is right if greedy decoding writes it, letter for letter. Right calls are of two kinds. Where the
dense model's token is at least twice as likely as any other at every place (`SURE`), a change is the codec's doing.
Elsewhere the model all but tosses a coin, and a change says little; how many there were is told beside.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.evaluation.scores.leads import leads
from karhunen.evaluation.scores.score import coded_copy
from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.evaluation.tasks.haystacks import essay, fill
from karhunen.hf.cache import dense_cache
from karhunen.hf.probe import forward, inference, text_config

BEGINNING = "Call:"
CITIES = ("Delft", "Rome", "Oslo", "Turin", "Ghent", "Paris", "Kyoto", "Quito", "Bergen", "Vienna", "Leeds", "Berlin")
CALL_TOKENS = 56  # room for a call
N_EXAMPLES = 4
SURE = math.log(2)  # nats of lead


@final
@dataclass(frozen=True)
class ToolCalls(Task):
    """`n_requests` prompts of about `n_tokens` tokens each, `n_each` of them after one text."""

    n_requests: int = 32
    n_tokens: int = 1024
    n_each: int = 4

    @property
    def name(self) -> str:
        """The same for all sizes."""
        return "tool_calls"

    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> "PreparedToolCalls":
        """Make the prompts; ValueError if they do not fit the model."""
        room = getattr(text_config(model), "max_position_embeddings", None)
        if room is not None and self.n_tokens + CALL_TOKENS > room:
            raise ValueError(f"tool calls after {self.n_tokens} tokens do not fit the model's {room} positions")
        n = min(self.n_requests, limit or self.n_requests)
        asked = [
            _asked(tokenizer, self.n_tokens, min(self.n_each, n - i), random.Random(f"tool call {seed} {i}"))
            for i in range(0, n, self.n_each)
        ]
        return PreparedToolCalls(model, tokenizer, asked)


@final
class PreparedToolCalls(Prepared):
    """Texts as token ids, and after each its requests with the calls they ask for."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, asked: Sequence[tuple[str, Sequence[tuple[str, dict[str, Any]]]]]
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.texts = [
            torch.tensor(tokenizer(text, truncation=False, verbose=False)["input_ids"], device=HOST)
            for text, _ in asked
        ]
        self.requests = [
            [(self._ids(request), self._ids(f" {json.dumps(call)}"), call) for request, call in requests]
            for _, requests in asked
        ]

    @property
    def inputs(self) -> str:
        """Of the token ids."""
        parts = [
            tokens.numpy().tobytes()
            for text, requests in zip(self.texts, self.requests, strict=True)
            for tokens in (text, *(ids for request in requests for ids in request[:2]))
        ]
        return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]

    @property
    def n_requests(self) -> int:
        """Of all texts."""
        return sum(map(len, self.requests))

    def measure(self, codec: Codec, advance: Callable[[int, int], None] = lambda *_: None) -> dict[str, Any]:
        """Every call; `same` is the share of the dense model's right calls that stay right, `sure_same` of those that
        it is sure of. `advance` is told how many requests are done, and of how many."""
        calls: list[dict[str, Any]] = []
        advance(0, self.n_requests)
        for text, requests in zip(self.texts, self.requests, strict=True):
            with inference(self.model):
                cache = dense_cache(self.model)
                forward(self.model, cache, text[None])
            for request, wanted, call in requests:
                calls.append({"wanted": call, **self._asked(codec, text, cache, request, wanted)})
                advance(len(calls), self.n_requests)
        right = [call for call in calls if call["dense_right"]]
        sure = [call for call in right if call["lead"] >= SURE]
        return {
            "metrics": {
                "same": _share(right),
                "dense_right": len(right) / len(calls),
                "n_requests": len(calls),
                "n_right": len(right),
                "n_sure": len(sure),
                "sure_same": _share(sure),
            },
            "calls": calls,
        }

    def _asked(self, codec: Codec, text: Tensor, read: Any, request: Tensor, wanted: Tensor) -> dict[str, Any]:
        """Both models on one call. `lead` is the least of the dense model's over the tokens of the call; `coded` is
        what the coded one writes up to its first other token."""
        cache = deepcopy(read)
        with inference(self.model):
            before = forward(self.model, cache, request[None]).logits[0, -1]
            coded = coded_copy(self.model, codec, torch.cat([text, request]), cache)
        lead, _ = leads(self.model, cache, before, wanted)
        coded_lead, said = leads(self.model, coded, before, wanted)
        coded.close()
        changed = (coded_lead <= 0).nonzero().flatten().tolist()
        end = changed[0] if changed else len(wanted) - 1
        return {
            "dense_right": bool((lead > 0).all()),
            "coded_right": not changed,
            "lead": float(lead.min()),
            "coded_lead": float(coded_lead.min()),
            "coded": str(self.tokenizer.decode([*wanted[:end].tolist(), int(said[end])])).strip(),
        }

    def _ids(self, text: str) -> Int[Tensor, " n"]:
        made = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return torch.tensor(made["input_ids"], device=HOST)


def _share(calls: Sequence[dict[str, Any]]) -> float:
    return sum(call["coded_right"] for call in calls) / len(calls) if calls else 0.0


def _asked(
    tokenizer: Any, n_tokens: int, n_requests: int, rng: random.Random
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """A text that makes prompts of about `n_tokens` tokens, and requests after it with the calls they ask for."""
    calls = [
        {
            "tool": "book",
            "id": rng.randrange(1000, 10_000),
            "city": rng.choice(CITIES),
            "seats": rng.randrange(2, 40),
            "confirm": True,
        }
        for _ in range(N_EXAMPLES + n_requests)
    ]
    shown = "\n".join(f"{_request(call)}\n{BEGINNING} {json.dumps(call)}" for call in calls[:N_EXAMPLES])
    asked = [(f"{_request(call)}\n{BEGINNING}", call) for call in calls[N_EXAMPLES:]]
    lines = essay(rng)

    longest = max((request for request, _ in asked), key=len)

    def make(n: int) -> str:
        text = "\n".join(lines[:n])
        return f"Each request becomes a call, as JSON.\n{shown}\n\n{text}\n\n{longest}"

    return fill(tokenizer, n_tokens, make, len(lines)).removesuffix(longest), asked


def _request(call: dict[str, Any]) -> str:
    return f"Request: book number {call['id']} in {call['city']} for {call['seats']} people."
