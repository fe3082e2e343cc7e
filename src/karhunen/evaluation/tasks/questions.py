"""Prompts with known answers, asked of the dense model and of its coded copy.

    question ─▶ chat template + answer's beginning ─▶ exact prefill (once) ─┬─▶ dense answer
                                                                            └─▶ coded copy ─▶ coded answer
A task that the dense model fails says nothing about a codec: its dense score stands beside every score, and below
CONCLUSIVE the result calls itself inconclusive.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.evaluation.scores.continuation import Prompt, coded_text, dense_text, read_prompt, stop_tokens
from karhunen.evaluation.scores.metrics import interval
from karhunen.evaluation.tasks.base import Prepared
from karhunen.hf.generation import prompt_tokens
from karhunen.hf.probe import text_config

CONCLUSIVE = 0.8
HELD_BYTES = 4 << 30  # of prompts that stay in memory between recipes; more are read again


@final
@dataclass(frozen=True)
class Question:
    """`all_answers`: the score is the share of answers that are found; else one of them is enough. `about` is shown in
    the result."""

    prompt: str
    beginning: str
    answers: tuple[str, ...]
    all_answers: bool = True
    max_new_tokens: int = 48
    about: dict[str, Any] = field(default_factory=dict[str, Any])

    def score(self, text: str) -> float:
        """Of a model's words, upper and lower case alike."""
        found = [answer.lower() in text.lower() for answer in self.answers]
        return sum(found) / len(found) if self.all_answers else float(any(found))


@final
class PreparedQuestions(Prepared):
    """Questions as token ids; dense answers are kept, and prompts as far as they fit."""

    def __init__(self, model: nn.Module, tokenizer: Any, questions: Sequence[Question]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.questions = list(questions)
        self.tokens = [_tokens(tokenizer, question) for question in self.questions]
        longest = max(len(t) + q.max_new_tokens for t, q in zip(self.tokens, self.questions, strict=True))
        room = getattr(text_config(model), "max_position_embeddings", None)
        if room is not None and longest > room:
            raise ValueError(
                f"a question of {longest} tokens does not fit the model's {room} positions; ask shorter ones"
            )
        self._held: dict[int, Prompt] = {}
        self._held_bytes = 0
        self._dense: dict[int, list[int]] = {}

    @property
    def inputs(self) -> str:
        """Of the token ids."""
        digest = hashlib.sha256()
        for tokens in self.tokens:
            digest.update(tokens.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]

    def measure(self, codec: Codec, advance: Callable[[int, int], None] = lambda *_: None) -> dict[str, Any]:
        """Every question, and the scores of both; `advance` is told how many are done, and of how many."""
        answers: list[dict[str, Any]] = []
        report: Any = None
        advance(0, len(self.questions))
        for i, question in enumerate(self.questions):
            prompt = self._prompt(i)
            tokens = self._dense_tokens(i, prompt)
            coded, report = coded_text(self.model, codec, prompt, question.max_new_tokens, self._stop, guess=tokens)
            said, dense = self._words(coded), self._words(tokens)
            answers.append(
                {
                    "answers": list(question.answers),
                    "dense": dense,
                    "coded": said,
                    "dense_score": question.score(dense),
                    "coded_score": question.score(said),
                    "prompt_tokens": len(self.tokens[i]),
                    **question.about,
                }
            )
            advance(len(answers), len(self.questions))
        mine, theirs = ([a[key] for a in answers] for key in ("coded_score", "dense_score"))
        found = interval([torch.tensor([value], dtype=torch.float64, device=HOST) for value in mine])
        dense_score = sum(theirs) / len(theirs)
        return {
            "metrics": {
                "score": found.mean,
                "score_low": found.low,
                "score_high": found.high,
                "dense_score": dense_score,
                "conclusive": dense_score >= CONCLUSIVE,
                "n_questions": len(answers),
            },
            "answers": answers,
            "cache": report.to_dict(),
        }

    def _prompt(self, i: int) -> Prompt:
        if i in self._held:
            return self._held[i]
        prompt = read_prompt(self.model, self.tokens[i])
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in prompt.cache.layers if hasattr(layer, "keys"))
        if self._held_bytes + size <= HELD_BYTES:
            self._held[i] = prompt
            self._held_bytes += size
        return prompt

    def _dense_tokens(self, i: int, prompt: Prompt) -> list[int]:
        if i not in self._dense:
            self._dense[i] = dense_text(self.model, prompt, self.questions[i].max_new_tokens, self._stop)
        return self._dense[i]

    def _words(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    @property
    def _stop(self) -> tuple[int, ...]:
        return stop_tokens(self.model, self.tokenizer)


def _tokens(tokenizer: Any, question: Question) -> Int[Tensor, " n"]:
    asked = prompt_tokens(tokenizer, question.prompt)[0]
    if not question.beginning:
        return asked
    begun = tokenizer(question.beginning, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    return torch.cat([asked, begun.to(asked.dtype)])
