"""A fact hidden in a document, at every depth of every length: the needle in a haystack.

Source: Kamradt (2023), "Needle in a haystack"; sentences and question as in RULER's second single needle.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from karhunen.codec import Codec
from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.evaluation.tasks.haystacks import essay, fill, hide, needle, values, words
from karhunen.evaluation.tasks.questions import PreparedQuestions, Question


@final
@dataclass(frozen=True)
class Needles(Task):
    """`n_each` questions for each cell. The defaults are what SmolLM2-135M finds without compression."""

    lengths: tuple[int, ...] = (500, 1000, 1500)
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    n_each: int = 2

    @property
    def name(self) -> str:
        """The same for all sizes."""
        return "needles"

    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> "PreparedNeedles":
        """One question per cell, then the next of each: a limit cuts whole rounds last."""
        cells = [(length, depth) for length in self.lengths for depth in self.depths]
        asked = [
            _question(tokenizer, length, depth, random.Random(f"needle {seed} {length} {depth} {i}"))
            for i in range(self.n_each) for length, depth in cells
        ]  # fmt: skip
        return PreparedNeedles(PreparedQuestions(model, tokenizer, asked[:limit]))


@final
class PreparedNeedles(Prepared):
    """Questions whose scores are also told by cell."""

    def __init__(self, questions: PreparedQuestions) -> None:
        self.questions = questions

    @property
    def inputs(self) -> str:
        """Of the questions."""
        return self.questions.inputs

    def measure(self, codec: Codec, advance: Callable[[int, int], None] = lambda *_: None) -> dict[str, Any]:
        """The questions' result, and a grid; `advance` is told how many questions are done, and of how many."""
        body = self.questions.measure(codec, advance)
        cells: dict[tuple[int, float], list[dict[str, Any]]] = {}
        for answer in body["answers"]:
            cells.setdefault((answer["length"], answer["depth"]), []).append(answer)
        grid = [
            {
                "length": length,
                "depth": depth,
                "dense": sum(a["dense_score"] for a in answers) / len(answers),
                "coded": sum(a["coded_score"] for a in answers) / len(answers),
            }
            for (length, depth), answers in sorted(cells.items())
        ]
        return {**body, "needles": grid}


def _question(tokenizer: Any, n_tokens: int, depth: float, rng: random.Random) -> Question:
    (key,), (value,) = words(rng, 1), values(rng, "numbers", 1)
    units = essay(rng)

    def make(n: int) -> str:
        text = hide(units[:n], [needle("numbers", key, value)], [depth])
        return (
            "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
            f"about the number afterwards.\n{text}\n"
            f"What is the special magic number for {key} mentioned in the provided text?"
        )

    beginning = f" The special magic number for {key} mentioned in the provided text is"
    about = {"length": n_tokens, "depth": depth}
    return Question(fill(tokenizer, n_tokens, make, len(units)), beginning, (value,), max_new_tokens=16, about=about)
