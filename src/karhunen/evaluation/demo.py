"""The whole job on one small model, measured: calibrate, answer a question on a long document, compare with dense.

    text A ─▶ statistics ─▶ codec ─┬─▶ text B + a fact + a question: the dense answer beside the compressed one
                                   └─▶ text C: logit KL and top-1 agreement against the dense run

A is the calibration text; B and C are parts of the evaluation text, which shares no paragraph with A or each other.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import nn

from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.texts import calibration_text, evaluation_text
from karhunen.codec import Codec
from karhunen.evaluation.scores.score import Document, Score, run_dense, score
from karhunen.fitting import fit
from karhunen.hf.attention import reading_bytes
from karhunen.hf.generation import Generation, generate, prompt_tokens
from karhunen.recipe import Recipe

FACT = "The access code of the museum archive is 5829317."
QUESTION = "What is the access code of the museum archive? Answer with the number."
ANSWER = "5829317"
FACT_TOKENS_BEFORE_END = 1500
"""At least; far outside every recipe's exact window, and within what SmolLM2 itself remembers of a document."""
ANSWER_TOKENS = 24

OnStage = Callable[[str], None]


@final
@dataclass(frozen=True)
class Demo:
    """What was measured. Nothing here is taken from settings but the question and where its answer stands."""

    recipe: str
    n_calibration_tokens: int
    calibration_seconds: float
    fit_seconds: float
    fact_tokens_before_end: int
    dense: Generation
    coded: Generation
    score: Score

    @property
    def kl(self) -> float:
        """Mean over the scored tokens, in nats."""
        return float(self.score.kl.double().mean())

    @property
    def top1_agreement(self) -> float:
        """Share of scored tokens whose most likely successor is the dense run's."""
        return float(self.score.agree.double().mean())

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`."""
        report = self.coded.report
        assert report is not None, "the coded run has a compressed cache"
        return {
            "recipe": self.recipe,
            "calibration": {
                "tokens": self.n_calibration_tokens,
                "seconds": self.calibration_seconds,
                "fit_seconds": self.fit_seconds,
            },
            "question": QUESTION,
            "answer": ANSWER,
            "fact_tokens_before_end": self.fact_tokens_before_end,
            "dense": _answer(self.dense),
            "coded": _answer(self.coded),
            "cache": report.to_dict(),
            "ratio_to_16_bits": 16 / report.total.bits_per_element,
            "scored": {
                "tokens": len(self.score.kl),
                "prefill_tokens": self.score.report.layers[0].n_tokens - len(self.score.kl),
                "kl_nats": self.kl,
                "top1_agreement": self.top1_agreement,
                "perplexity_dense": float(self.score.nll_dense.double().mean().exp()),
                "perplexity_coded": float(self.score.nll_coded.double().mean().exp()),
                "bits_per_element": self.score.report.total.bits_per_element,
                "encode_seconds": self.score.encode_seconds,
            },
        }


def run_demo(
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    *,
    calibration_tokens: int = 8192,
    prompt_length: int = 4096,
    scored_tokens: int = 256,
    on_stage: OnStage | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Demo:
    """Run it all. `on_stage` hears what begins, `progress` the calibration's tokens.

    ValueError if the evaluation text is too short for what was asked.
    """
    say = on_stage or (lambda _: None)
    say(f"calibrating on {calibration_tokens:,} tokens")
    start = time.perf_counter()
    statistics = calibrate(
        model, calibration_text(), recipe.needs(), tokenizer, max_tokens=calibration_tokens, progress=progress
    )
    calibrated = time.perf_counter()
    say(f"fitting {recipe.name}")
    codec = fit(recipe, statistics)
    fitted = time.perf_counter()
    document, rest = split_text(tokenizer, prompt_length)
    prompt, n_after = prompt_with_fact(tokenizer, document)
    tokens = prompt_tokens(tokenizer, prompt)
    say(f"asking the dense model about a document: a prompt of {tokens.shape[1]:,} tokens")
    dense = generate(model, tokenizer, tokens, max_new_tokens=ANSWER_TOKENS)
    say("asking again, from the compressed cache")
    with reading_bytes(model):
        coded = generate(model, tokenizer, tokens, codec, max_new_tokens=ANSWER_TOKENS, exact_dtype=torch.bfloat16)
    say(f"scoring {scored_tokens} tokens of another text after {prompt_length:,} tokens of context")
    return Demo(
        recipe=recipe.name,
        n_calibration_tokens=statistics.n_tokens,
        calibration_seconds=calibrated - start,
        fit_seconds=fitted - calibrated,
        fact_tokens_before_end=n_after,
        dense=dense,
        coded=coded,
        score=_score(model, tokenizer, codec, rest, prompt_length, scored_tokens),
    )


def split_text(tokenizer: Any, n_tokens: int) -> tuple[list[str], str]:
    """The evaluation text in two: paragraphs of at least `n_tokens` in all, and what follows them."""
    paragraphs = evaluation_text().split("\n\n")
    total = 0
    for i, paragraph in enumerate(paragraphs):
        total += _length(tokenizer, paragraph + "\n\n")
        if total >= n_tokens:
            return paragraphs[: i + 1], "\n\n".join(paragraphs[i + 1 :])
    raise ValueError(f"the evaluation text has {total} tokens; a document of {n_tokens} was asked for")


def prompt_with_fact(tokenizer: Any, paragraphs: list[str]) -> tuple[str, int]:
    """The document with the fact in it, then the question; and how many tokens follow the fact."""
    after: list[str] = []
    before = list(paragraphs)
    while before and _length(tokenizer, "\n\n".join(after)) < FACT_TOKENS_BEFORE_END:
        after.insert(0, before.pop())
    tail = "\n\n".join([*after, QUESTION])
    prompt = "Here is a document.\n\n" + "\n\n".join([*before, FACT, tail])
    return prompt, _length(tokenizer, tail)


def _score(model: nn.Module, tokenizer: Any, codec: Codec, text: str, prefill_tokens: int, scored_tokens: int) -> Score:
    n = prefill_tokens + scored_tokens
    ids = tokenizer(text, truncation=False, verbose=False, return_tensors="pt")["input_ids"][0, :n]
    if len(ids) < n:
        raise ValueError(f"the rest of the evaluation text has {len(ids)} tokens; {n} were asked for")
    with torch.no_grad():
        return score(model, codec, run_dense(model, Document("evaluation text", ids, prefill_tokens)))


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def _answer(generation: Generation) -> dict[str, Any]:
    body = asdict(generation)
    del body["report"]
    return {**body, "found": ANSWER in generation.text.replace(",", "").replace(" ", "")}
