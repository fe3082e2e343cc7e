"""RULER's thirteen tasks, made from their definitions at any length, by a seed.

| kind             | haystack | needles                                            |
|------------------|----------|----------------------------------------------------|
| niah_single_1-3  | noise, essay, essay | one number, number, UUID                |
| niah_multikey_1-3| essay, needles, needles (UUIDs) | one asked for, the others in the way |
| niah_multivalue  | essay    | four values of one key                             |
| niah_multiquery  | essay    | four keys, all asked for                           |
| vt               | noise    | a chain of variables with one value                |
| cwe, fwe         |          | the commonest words of a list, of a coded text     |
| qa_1, qa_2       | passages | one fact, or two that lead to each other           |

Source: RULER (arXiv:2404.06654) and its templates. Here: passages of the questions are made up, or given in a file.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.evaluation.tasks.haystacks import NOISE, essay, fill, hide, needle, values, words
from karhunen.evaluation.tasks.questions import PreparedQuestions, Question
from karhunen.evaluation.tasks.ruler_lists import common_words, frequent_words, passages, tracked_variables

Make = Callable[[Any, int, random.Random], Question]


@final
@dataclass(frozen=True)
class Needles:
    """One kind of needle question: what hides it, how many keys and values there are, and how many are asked for."""

    haystack: str
    value_kind: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1

    def __call__(self, tokenizer: Any, n_tokens: int, rng: random.Random) -> Question:
        """A question of at most so many tokens, its answer's beginning included."""
        kind = self.value_kind
        keys = words(rng, max(self.n_keys, self.n_queries))
        facts = {key: values(rng, kind, self.n_values) for key in keys}
        asked = rng.sample(keys, self.n_queries)
        sentences = [needle(kind, key, value) for key in keys for value in facts[key]]
        depths = [rng.random() for _ in sentences]
        units = _units(self.haystack, kind, n_tokens, rng)
        query = ", ".join(asked[:-1]) + (", and " if len(asked) > 1 else "") + asked[-1]
        many = self.n_values * self.n_queries > 1
        what = f"special magic {kind}" if many else f"special magic {kind.removesuffix('s')}"
        are = "are" if many else "is"

        def make(n: int) -> str:
            text = hide(units[:n], sentences, depths)
            return (
                f"{'Some' if many else 'A'} {what} {are} hidden within the following text. Make sure to memorize it. "
                f"I will quiz you about the {what} afterwards.\n{text}\n"
                f"What {are} {'all ' if many else ''}the {what} for {query} mentioned in the provided text?"
            )

        beginning = f" The {what} for {query} mentioned in the provided text {are}"
        answers = tuple(value for key in asked for value in facts[key])
        n_new = 24 * len(answers) + (24 if kind == "uuids" else 8)
        return Question(fill(tokenizer, n_tokens, make, len(units)), beginning, answers, max_new_tokens=n_new)


KINDS: dict[str, Make] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", "uuids"),
    "niah_multikey_1": Needles("essay", n_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", "uuids"),
    "niah_multivalue": Needles("essay", n_values=4),
    "niah_multiquery": Needles("essay", n_queries=4),
    "vt": tracked_variables,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa_1": passages(n_hops=1),
    "qa_2": passages(n_hops=2),
}

SUITE: tuple[tuple[str, int], ...] = (
    ("niah_single_1", 1500),
    ("niah_single_2", 1500),
    ("niah_multikey_1", 1000),
    ("niah_multivalue", 500),
)
"""Kinds and lengths that SmolLM2 without compression does in four of five questions or more, as
benchmarks/ruler_settings.py found (results/measured/ruler-smollm2.json); kinds it was not asked about are not here."""


@final
@dataclass(frozen=True)
class Ruler(Task):
    """`n_questions` of one kind at one length. `passages_file` gives the questions of qa: JSON, a list of objects with
    `question`, `answers` and `passages`."""

    kind: str
    n_tokens: int = 1500
    n_questions: int = 10
    passages_file: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r} of RULER; known: {', '.join(KINDS)}")
        if self.passages_file and not self.kind.startswith("qa"):
            raise ValueError(f"{self.kind} takes no passages; only qa_1 and qa_2 do")

    @property
    def name(self) -> str:
        """Kind and length."""
        return f"ruler {self.kind} {self.n_tokens}"

    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> Prepared:
        """Make the questions, each from a seed of its own, so that a limit changes none of them."""
        make = passages(1, Path(self.passages_file)) if self.passages_file else KINDS[self.kind]
        n = min(self.n_questions, limit or self.n_questions)
        rngs = [random.Random(f"{self.kind} {seed} {i}") for i in range(n)]
        return PreparedQuestions(model, tokenizer, [make(tokenizer, self.n_tokens, rng) for rng in rngs])


def _units(haystack: str, kind: str, n_tokens: int, rng: random.Random) -> list[str]:
    if haystack == "noise":
        return [NOISE] * n_tokens
    if haystack == "essay":
        return essay(rng)
    keys = words(rng, min(2000, n_tokens // 8 + 1))
    return [needle(kind, key, value) for key, value in zip(keys, values(rng, kind, len(keys)), strict=True)]
