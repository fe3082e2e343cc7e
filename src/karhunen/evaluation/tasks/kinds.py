"""The kinds of questions that share a text, as one task: which, how long, how many.

A kind is a function that makes a text with its questions, and a rule that says which answers are right.
"""

import random
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from karhunen.evaluation.tasks.asked import Asked, PreparedAsked, Right, same_line, says
from karhunen.evaluation.tasks.base import Task
from karhunen.evaluation.tasks.facts import Make, chat, documents, passkeys
from karhunen.evaluation.tasks.patterns import calls, code, copying, lists, same_call, sums

KINDS: dict[str, tuple[Make, Right]] = {
    "passkeys": (passkeys, says),
    "documents": (documents, says),
    "chat": (chat, says),
    "code": (code, same_line),
    "copying": (copying, same_line),
    "lists": (lists, same_line),
    "sums": (sums, same_line),
    "calls": (calls, same_call),
}


@final
@dataclass(frozen=True)
class Kind(Task):
    """`n_texts` texts of about `n_tokens` tokens, `n_each` questions to each. The defaults are ten times ten."""

    kind: str
    n_tokens: int = 1500
    n_texts: int = 10
    n_each: int = 10

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r} of question; known: {', '.join(KINDS)}")
        if self.n_texts < 1 or self.n_each < 1:
            raise ValueError(f"n_texts={self.n_texts}, n_each={self.n_each}: ask 1 question or more of 1 text or more")

    @property
    def name(self) -> str:
        """Kind and length."""
        return f"{self.kind} {self.n_tokens}"

    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> PreparedAsked:
        """All texts, or as many as the limit says; no text depends on their number."""
        n = min(self.n_texts, limit or self.n_texts)
        return PreparedAsked(model, tokenizer, [self.text(tokenizer, seed, i) for i in range(n)], KINDS[self.kind][1])

    def prepare_text(self, model: nn.Module, tokenizer: Any, seed: int, i: int) -> PreparedAsked:
        """One text alone."""
        return PreparedAsked(model, tokenizer, [self.text(tokenizer, seed, i)], KINDS[self.kind][1])

    def text(self, tokenizer: Any, seed: int, i: int) -> Asked:
        """The text of this number, with its questions."""
        chance = random.Random(f"{self.kind} {self.n_tokens} {seed} {i}")
        return KINDS[self.kind][0](tokenizer, self.n_tokens, self.n_each, chance)
