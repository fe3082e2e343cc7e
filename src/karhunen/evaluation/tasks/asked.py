"""Many questions to one text: it is read and coded once, and every question goes on from there by itself.

    text ─▶ dense cache ─┬─▶ question ─▶ dense answer                      (branches: what one question adds, none sees)
                         └─▶ coded ────▶ question ─▶ coded answer
A question comes after the text was coded, as a later turn of a conversation does: a method that chooses tokens by a
prompt's last queries has not seen it. Greedy answers, to the end of their first line. An answer that may be right is
read at once instead of in steps; where the model says something else, it goes on from there.
"""

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.evaluation.scores.continuation import stop_tokens
from karhunen.evaluation.scores.leads import leads
from karhunen.evaluation.scores.metrics import rouge_l
from karhunen.evaluation.scores.score import coded_copy
from karhunen.evaluation.scores.shares import wilson
from karhunen.evaluation.tasks.base import Prepared
from karhunen.evaluation.tasks.dense_memory import DenseMemory
from karhunen.evaluation.tasks.questions import CONCLUSIVE
from karhunen.hf.cache import CompressedCache, dense_cache
from karhunen.hf.probe import forward, inference, text_config

Right = Callable[[str, str], bool]
"""Whether what was said (second) is the answer (first)."""


@final
@dataclass(frozen=True)
class Ask:
    """What follows the text, and the line that should come then, after `before`. `about` is shown in the result."""

    text: str
    answer: str
    max_new_tokens: int = 16
    before: str = " "
    about: dict[str, Any] = field(default_factory=dict[str, Any])


@final
@dataclass(frozen=True)
class Asked:
    """A text and the questions to it."""

    text: str
    asks: tuple[Ask, ...]


def says(answer: str, said: str) -> bool:
    """The answer stands in what was said, upper and lower case alike."""
    return answer.lower() in said.lower()


def same_line(answer: str, said: str) -> bool:
    """Letter for letter, but for spaces around."""
    return answer.strip() == said.strip()


@final
class PreparedAsked(Prepared):
    """Texts and questions as token ids. ValueError if a text with its longest answer does not fit the model."""

    def __init__(self, model: nn.Module, tokenizer: Any, asked: Sequence[Asked], right: Right) -> None:
        self.model, self.tokenizer, self.right = model, tokenizer, right
        self.asked = tuple(asked)
        self.texts = [self._ids(one.text, special=True) for one in self.asked]
        self.questions = [[self._ids(ask.text) for ask in one.asks] for one in self.asked]
        self.memory = DenseMemory(model)
        self._stop = stop_tokens(model, tokenizer)
        room = getattr(text_config(model), "max_position_embeddings", None)
        longest = max(
            len(text) + max(len(q) + ask.max_new_tokens for q, ask in zip(questions, one.asks, strict=True))
            for text, questions, one in zip(self.texts, self.questions, self.asked, strict=True)
        )
        if room is not None and longest > room:
            raise ValueError(f"{longest} tokens do not fit the model's {room} positions; ask for shorter texts")

    @property
    def inputs(self) -> str:
        """Of the token ids."""
        digest = hashlib.sha256()
        for text, questions in zip(self.texts, self.questions, strict=True):
            for tokens in (text, *questions):
                digest.update(tokens.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]

    @property
    def n_questions(self) -> int:
        """To all texts."""
        return sum(map(len, self.questions))

    def keep_in(self, folder: Path) -> None:
        """Dense caches and answers go to files there, and are found by the next process."""
        self.memory = DenseMemory(self.model, folder)

    def measure(self, codec: Codec, advance: Callable[[int, int], None] = lambda *_: None) -> dict[str, Any]:
        """Every question, answered by both; `advance` is told how many are done, and of how many."""
        answers: list[dict[str, Any]] = []
        report: Any = None
        advance(0, self.n_questions)
        for i, one in enumerate(self.asked):
            dense, said = self._dense(i)
            with inference(self.model):
                coded = coded_copy(self.model, codec, self.texts[i], dense)
                for layer in coded.coded_layers():
                    layer.store.read()  # decoded once, for all branches
            report = coded.report()
            for ask, question, theirs in zip(one.asks, self.questions[i], said, strict=True):
                mine = self._answer(coded.branch, question, theirs, ask.max_new_tokens)
                answers.append(self._scored(i, ask, theirs, mine))
                advance(len(answers), self.n_questions)
            coded.close()
        return {"metrics": metrics_of(answers), "answers": answers, "cache": report.to_dict()}

    def dense_scores(self) -> list[bool]:
        """Whether the dense model's answers are right."""
        return [
            self.right(ask.answer, self._line(said))
            for i, one in enumerate(self.asked)
            for ask, said in zip(one.asks, self._dense(i)[1], strict=True)
        ]

    def _scored(self, i: int, ask: Ask, theirs: list[int], mine: list[int]) -> dict[str, Any]:
        dense, coded = self._line(theirs), self._line(mine)
        return {
            "answer": ask.answer, "dense": dense, "coded": coded,
            "dense_score": self.right(ask.answer, dense), "coded_score": self.right(ask.answer, coded),
            "same": dense == coded, "similarity": round(_similarity(coded, dense), 4),
            "text": i, "text_tokens": len(self.texts[i]), **ask.about,
        }  # fmt: skip

    def _dense(self, i: int) -> tuple[Any, list[list[int]]]:
        """The dense cache after the text, and the dense model's answers."""

        def read() -> Any:
            with inference(self.model):
                cache = dense_cache(self.model)
                forward(self.model, cache, self.texts[i][None])
            return cache

        def answered(cache: Any) -> list[list[int]]:
            pairs = zip(self.asked[i].asks, self.questions[i], strict=True)
            return [
                self._answer(lambda: deepcopy(cache), question, guess, ask.max_new_tokens)
                for ask, question in pairs
                for guess in [self._ids(ask.before + ask.answer).tolist()]
            ]

        return self.memory.of(self.texts[i], self.questions[i], read, answered)

    def _answer(self, branch: Callable[[], Any], question: Tensor, guess: Sequence[int], n: int) -> list[int]:
        """Greedy tokens after the question, `guess` being what they may be."""
        with inference(self.model):
            cache = branch()
            before = forward(self.model, cache, question[None]).logits[0, -1]
            tokens = [int(before.argmax())]
            if guess and tokens[0] == guess[0]:
                trial = cache.branch() if isinstance(cache, CompressedCache) else deepcopy(cache)
                lead, likeliest = leads(self.model, trial, before, torch.tensor(guess, device=HOST))
                wrong = (lead <= 0).nonzero().flatten().tolist()
                if wrong:
                    tokens = [*guess[: wrong[0]], int(likeliest[wrong[0]])]
                    leads(self.model, cache, before, torch.tensor(tokens, device=HOST))  # reads all but the last
                else:
                    tokens, cache = list(guess), trial
            while len(tokens) < n and not self._ended(tokens):
                last = torch.tensor([tokens[-1:]], device=HOST)
                tokens.append(int(forward(self.model, cache, last).logits[0, -1].argmax()))
        return tokens[:n]

    def _ended(self, tokens: list[int]) -> bool:
        return tokens[-1] in self._stop or "\n" in str(self.tokenizer.decode(tokens)).lstrip()

    def _line(self, tokens: list[int]) -> str:
        said = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return next((line.strip() for line in said.splitlines() if line.strip()), "")

    def _ids(self, text: str, special: bool = False) -> Int[Tensor, " n"]:
        made = self.tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)
        return torch.tensor(made["input_ids"], device=HOST)


def metrics_of(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of right answers of both with Wilson's interval, of answers that are the dense model's, and how alike."""
    n = len(answers)
    right, dense = (sum(bool(a[name]) for a in answers) for name in ("coded_score", "dense_score"))
    low, high = wilson(right, n)
    return {
        "score": right / n, "score_low": low, "score_high": high, "dense_score": dense / n,
        "conclusive": dense / n >= CONCLUSIVE, "n_questions": n,
        "same": sum(bool(a["same"]) for a in answers) / n,
        "similarity": sum(cast("float", a["similarity"]) for a in answers) / n,
    }  # fmt: skip


def _similarity(a: str, b: str) -> float:
    """1 − (letters to take out and to put in) / (letters of both)."""
    return rouge_l([ord(c) for c in a], [ord(c) for c in b])
