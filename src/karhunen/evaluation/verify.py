"""Is this codec good enough for this model? Gates against the uncompressed model, kept as the codec's report card.

texts ─▶ logit KL (mean, 99.9 %), top-1          ┐
         logit KL after a prompt that was pages  ├─▶ gates ─▶ report card
needles ─▶ facts found                           │
tool calls ─▶ JSON that stays the same           ┘   of those that the uncompressed model is sure of

Texts show what most tokens lose; needles and tool calls what a mean hides (one fact, one brace).
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor, nn

from karhunen.card import Gate, ReportCard
from karhunen.codec import Codec
from karhunen.device import named
from karhunen.evaluation.documents import default_documents, file_documents
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.metrics import percentile
from karhunen.evaluation.scores.restored import score_restored
from karhunen.evaluation.scores.score import Document, Score, run_dense, score
from karhunen.evaluation.tasks.needles import Needles
from karhunen.evaluation.tasks.questions import CONCLUSIVE
from karhunen.evaluation.tasks.tool_calls import ToolCalls
from karhunen.hf.describe import identity_of
from karhunen.hf.probe import text_config
from karhunen.store.account import Account

EXACT_BITS = 16
FEW_CALLS = 8  # that the uncompressed model is sure of; with fewer, tool calls say nothing of a codec
QUICK_CALLS = 3  # as above in a quick run
FEW_TOKENS = 1000  # below this the 99.9th percentile is the largest value


@final
@dataclass(frozen=True)
class Limits:
    """What is good enough: at most so much KL (nats), at least so much agreement. Needles are the share that is still
    found of what the uncompressed model finds."""

    kl: float = 0.02
    kl_p999: float = 1.0
    pages: float = 0.05
    top1: float = 0.95
    needles: float = 0.9
    tool_calls: float = 0.9

    def __post_init__(self) -> None:
        shares = {"top1": self.top1, "needles": self.needles, "tool_calls": self.tool_calls}
        if wrong := [name for name, share in shares.items() if not 0 <= share <= 1]:
            raise ValueError(f"{wrong[0]}={shares[wrong[0]]} is not a share; use 0 to 1")
        if not all(0 <= kl < math.inf for kl in (self.kl, self.kl_p999, self.pages)):
            raise ValueError(f"kl={self.kl}, kl_p999={self.kl_p999}, pages={self.pages}: KL is a finite 0 or more")


@final
@dataclass(frozen=True)
class Size:
    """How much is measured."""

    prefill_tokens: int = 2560
    scored_tokens: int = 384
    n_documents: int = 3
    needles: Needles = Needles()
    tool_calls: ToolCalls = ToolCalls()
    quick: bool = False

    @property
    def quickly(self) -> "Size":
        """Of a quick run: at most one text of 1,024 + 128 tokens, six needles, eight tool calls after two texts."""
        return Size(
            min(self.prefill_tokens, 1024),
            min(self.scored_tokens, 128),
            1,
            Needles(lengths=(500, 1000), n_each=1),
            ToolCalls(n_requests=8),
            quick=True,
        )


Advance = Callable[[int, int], None]
"""Told how much is done, and of how much."""
Part = Callable[[str, str], AbstractContextManager[Advance]]
"""Given what is measured and what is counted, what to tell of it."""


def verify(
    model: nn.Module,
    tokenizer: Any,
    codec: Codec,
    files: Sequence[Path] = (),
    *,
    name: str = "",
    limits: Limits | None = None,
    size: Size | None = None,
    seed: int = 0,
    part: Part = lambda *_: nullcontext(lambda *_: None),
) -> Codec:
    """The codec with its report card; ValueError if it was made for another model, or the texts are too short. `part`
    opens what shows the progress of each part."""
    limits, size = limits or Limits(), size or Size()
    codec.check_model(identity_of(model))
    sizes = {"prefill_tokens": size.prefill_tokens, "scored_tokens": size.scored_tokens}
    if files:
        documents = file_documents(tokenizer, files, limit=size.n_documents, **sizes)
    else:
        n_code = size.n_documents // 3
        counts = {"n_prose": size.n_documents - n_code, "n_code": n_code, "n_literature": 0}
        documents = default_documents(tokenizer, "test", **counts, seed=seed, **sizes)
    with part("texts", "tokens") as advance:
        scores, restored = _scored(model, codec, documents, advance)
    bits = fmean(bits_of(one.report.total) for one in scores)
    gates = _text_gates(scores, limits)
    if restored:
        kl = float(torch.cat(restored).double().mean())
        gates.append(Gate("KL after a prompt restored from pages", kl, limits.pages, at_least=False, unit="nats"))
    with part("needles", "questions") as advance:
        gates.append(_needle_gate(model, tokenizer, codec, limits, size, seed, advance))
    with part("tool calls", "calls") as advance:
        gates.append(_call_gate(model, tokenizer, codec, limits, size, seed, advance))
    made = provenance()
    card = ReportCard(
        codec=codec.fingerprint(),
        model=name or codec.model.architecture,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        texts=tuple(f"{document.name} {_hash(document)}" for document in documents),
        n_scored=sum(len(one.kl) for one in scores),
        bits_per_element=bits,
        ratio=EXACT_BITS / bits,
        gates=tuple(gates),
        made={
            "date": made.date,
            "commit": made.commit,
            "machine": made.machine,
            "device": _devices(model),
            **made.versions,
        },
        quick=size.quick,
    )
    return replace(codec, card=card)


def bits_of(held: Account) -> float:
    """Per element of the coded tokens, of all where none is coded; an exact scalar counts 16 bits."""
    if not held.n_coded_elements:
        return EXACT_BITS * held.held / held.dense
    n_exact = held.exceptions * held.n_elements / held.dense
    return (8 * (held.codes + held.side) + EXACT_BITS * n_exact) / held.n_coded_elements


def _scored(
    model: nn.Module, codec: Codec, documents: Sequence[Document], advance: Advance
) -> tuple[list[Score], list[Tensor]]:
    """Scores, and KL after a prompt that was pages; each text is read once and scored three times."""
    scores: list[Score] = []
    restored: list[Tensor] = []
    n_runs, done = 2 if codec.window.drops else 3, 0
    total = sum(document.prefill_tokens + n_runs * len(document.scored) for document in documents)

    def tick(n_tokens: int) -> None:
        nonlocal done
        done += n_tokens
        advance(done, total)

    tick(0)
    for document in documents:
        dense = run_dense(model, document, tick=tick)
        scores.append(score(model, codec, dense, tick))
        if not codec.window.drops:
            restored.append(score_restored(model, codec, dense, tick)[0])
    return scores, restored


def _text_gates(scores: list[Score], limits: Limits) -> list[Gate]:
    kl, agree = [one.kl for one in scores], [one.agree for one in scores]
    n = sum(len(values) for values in kl)
    most = "99.9 %" if n >= FEW_TOKENS else f"the largest of {n}"
    mean = sum(float(values.double().sum()) for values in kl) / n
    return [
        Gate("KL, mean", mean, limits.kl, at_least=False, unit="nats"),
        Gate(f"KL, {most}", percentile(kl, 0.999), limits.kl_p999, at_least=False, unit="nats"),
        Gate("top-1 agreement", sum(float(a.double().sum()) for a in agree) / n, limits.top1, at_least=True),
    ]


def _needle_gate(
    model: nn.Module, tokenizer: Any, codec: Codec, limits: Limits, size: Size, seed: int, advance: Advance
) -> Gate:
    name, longest = "needles found", max(size.needles.lengths)
    room = getattr(text_config(model), "max_position_embeddings", None)
    if room is not None and longest > room:
        reason = f"questions of {longest} tokens do not fit the model's {room} positions"
        return Gate(name, 0.0, limits.needles, at_least=True, reason=reason)
    try:
        found = size.needles.prepare(model, tokenizer, seed, None).measure(codec, advance)["metrics"]
    except ValueError as error:
        return Gate(name, 0.0, limits.needles, at_least=True, reason=str(error))
    dense = float(found["dense_score"])
    if dense < CONCLUSIVE:
        reason = f"the uncompressed model itself finds {dense:.2f} of {found['n_questions']}"
        return Gate(name, float(found["score"]), limits.needles, at_least=True, dense=dense, reason=reason)
    n = int(found["n_questions"])
    note = f"{found['score'] * n:.0f} of {n}; uncompressed {dense * n:.0f}"
    return Gate(name, float(found["score"]) / dense, limits.needles, at_least=True, dense=dense, note=note)


def _call_gate(
    model: nn.Module, tokenizer: Any, codec: Codec, limits: Limits, size: Size, seed: int, advance: Advance
) -> Gate:
    """Of calls that the uncompressed model is sure of; its close calls are told beside, right ones that change too."""
    name = "sure tool calls that stay right"
    try:
        found = size.tool_calls.prepare(model, tokenizer, seed, None).measure(codec, advance)["metrics"]
    except ValueError as error:
        return Gate(name, 0.0, limits.tool_calls, at_least=True, reason=str(error))
    n, n_right, n_sure = (int(found[key]) for key in ("n_requests", "n_right", "n_sure"))
    share, right = float(found["sure_same"]), float(found["dense_right"])
    if n_sure < (QUICK_CALLS if size.quick else FEW_CALLS):
        reason = f"of {n} calls the uncompressed model itself gets {n_right} right and is sure of {n_sure}"
        return Gate(name, share, limits.tool_calls, at_least=True, dense=right, reason=reason)
    note = f"{share * n_sure:.0f} of {n_sure}"
    if n_close := n_right - n_sure:
        note += f"; of {n_close} close ones {found['same'] * n_right - share * n_sure:.0f}"
    return Gate(name, share, limits.tool_calls, at_least=True, dense=right, note=note)


def _devices(model: nn.Module) -> str:
    """Those that its weights lie on."""
    return ", ".join(dict.fromkeys(named(weight.device) for weight in model.parameters()))


def _hash(document: Document) -> str:
    return hashlib.sha256(document.tokens.numpy().tobytes()).hexdigest()[:16]
