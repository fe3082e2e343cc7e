"""Decode-style scoring on documents: logit KL, top-1 agreement, likelihood, and a free continuation.

Documents are those of one split of `documents.py`, or the user's files cut to the same length.
"""

import hashlib
import resource
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.evaluation.documents import MODULES, SPLITS, Split, default_documents, file_documents
from karhunen.evaluation.results.composition import anatomy
from karhunen.evaluation.scores.attention_error import attention_errors, capture
from karhunen.evaluation.scores.continuation import Prompt, agreement, coded_text, dense_text, read_prompt, stop_tokens
from karhunen.evaluation.scores.coordinates import coordinates
from karhunen.evaluation.scores.metrics import interval, percentile, perplexity
from karhunen.evaluation.scores.score import DenseRun, Document, Score, run_dense, score
from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.hf.probe import text_config

CHUNK_TOKENS = 256
ATTENTION_TOKENS = 2048  # of the first document, for the error of single layers


@final
@dataclass(frozen=True)
class Texts(Task):
    """`prefill` is exact (a prompt is read exactly, then coded) or chunked (each chunk reads coded history)."""

    files: tuple[str, ...] = ()
    split: Split = "test"
    n_prose: int = 1
    n_code: int = 1
    n_literature: int = 1
    prefill_tokens: int = 2560
    scored_tokens: int = 384
    generated_tokens: int = 64
    prefill: str = "exact"

    def __post_init__(self) -> None:
        if self.prefill not in ("exact", "chunked"):
            raise ValueError(f"unknown prefill {self.prefill!r}; known: exact, chunked")
        if self.split not in SPLITS:
            raise ValueError(f"unknown documents {self.split!r}; known: {', '.join(SPLITS)}")
        if self.n_code > (n_modules := len(MODULES[self.split])):
            raise ValueError(f"{self.n_code} documents of code were asked for; there are {n_modules} modules")

    @property
    def name(self) -> str:
        """Of the text."""
        counts = (self.n_prose, self.n_code, self.n_literature)
        documents = f"texts:{self.split}" + ("" if counts == (1, 1, 1) else f"@{','.join(map(str, counts))}")
        base = documents if not self.files else "text " + " ".join(Path(file).name for file in self.files)
        return base if self.prefill == "exact" else f"{base} {self.prefill}"

    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> Prepared:
        """Cut the documents."""
        n = self.prefill_tokens + max(self.scored_tokens, self.generated_tokens)
        room = getattr(text_config(model), "max_position_embeddings", None)
        if room is not None and n > room:
            raise ValueError(f"documents of {n} tokens do not fit the model's {room} positions; ask for shorter ones")
        sizes = {"prefill_tokens": self.prefill_tokens, "scored_tokens": self.scored_tokens}
        if self.files:
            documents = file_documents(tokenizer, [Path(f) for f in self.files], limit=limit, **sizes)
        else:
            counts = {"n_prose": self.n_prose, "n_code": self.n_code, "n_literature": self.n_literature}
            documents = default_documents(tokenizer, self.split, seed=seed, **counts, **sizes)
            documents = documents[:limit]
        return PreparedTexts(self, model, tokenizer, documents)


@final
class PreparedTexts(Prepared):
    """Documents, and the dense runs on them once one was asked for."""

    def __init__(self, task: Texts, model: nn.Module, tokenizer: Any, documents: list[Document]) -> None:
        self.task = task
        self.model = model
        self.tokenizer = tokenizer
        self.documents = documents

    @property
    def inputs(self) -> str:
        """Of the token ids."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.tokens.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]

    @cached_property
    def dense(self) -> list[DenseRun]:
        """One run per document."""
        chunk = CHUNK_TOKENS if self.task.prefill == "chunked" else None
        return [run_dense(self.model, document, chunk) for document in self.documents]

    @cached_property
    def attention(self) -> Any:
        """Keys, values and queries of the first document, by layer."""
        return capture(self.model, self.documents[0].tokens[:ATTENTION_TOKENS])

    @cached_property
    def continuation(self) -> tuple[Prompt, list[int]]:
        """The first document's prompt, and the dense model's continuation of it."""
        document = self.documents[0]
        prompt = read_prompt(self.model, document.tokens[: document.prefill_tokens])
        said = dense_text(self.model, prompt, self.task.generated_tokens, stop_tokens(self.model, self.tokenizer))
        return prompt, said

    def measure(self, codec: Codec) -> dict[str, Any]:
        """Everything that is said of a codec on text."""
        scores = [score(self.model, codec, dense) for dense in self.dense]
        return {
            "metrics": _metrics(scores),
            "documents": [_document(d, s) for d, s in zip(self.documents, scores, strict=True)],
            "tokens": [_tokens(s) for s in scores],
            "cache": scores[0].report.to_dict(),
            "layers": [asdict(error) for error in attention_errors(codec, self.attention)],
            "bits": _bits(codec),
            "coordinates": [asdict(side) for side in coordinates(codec, self.attention)],
            **({"continuation": self._continue(codec)} if self.task.generated_tokens else {}),
            "seconds": {
                "encode_per_token": sum(s.encode_seconds for s in scores)
                / sum(d.prefill_tokens for d in self.documents),
                "decode_prompt": sum(s.decode_seconds for s in scores) / len(scores),
                "dense_per_token": sum(s.dense_seconds_per_token for s in scores) / len(scores),
            },
            "process_peak_bytes": peak_bytes(),
        }

    def _continue(self, codec: Codec) -> dict[str, Any]:
        prompt, dense = self.continuation
        coded, _ = coded_text(self.model, codec, prompt, len(dense), stop_tokens(self.model, self.tokenizer))
        return asdict(agreement(dense, coded))


def peak_bytes() -> int:
    """The most memory this process has held so far, the model included."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _metrics(scores: list[Score]) -> dict[str, Any]:
    delta = [s.nll_coded.double() - s.nll_dense.double() for s in scores]
    return {
        "kl": {**asdict(interval([s.kl for s in scores])), "p99": percentile([s.kl for s in scores], 0.99)},
        "top1_agreement": asdict(interval([s.agree for s in scores])),
        "nll_delta": asdict(interval(delta)),
        "perplexity_dense": perplexity([s.nll_dense for s in scores]),
        "perplexity_coded": perplexity([s.nll_coded for s in scores]),
        "n_tokens": sum(len(s.kl) for s in scores),
    }


def _document(document: Document, of: Score) -> dict[str, Any]:
    return {
        "name": document.name,
        "prefill_tokens": document.prefill_tokens,
        "scored_tokens": len(document.scored),
        "kl": float(of.kl.double().mean()),
        "top1_agreement": float(of.agree.double().mean()),
        "coded_bits_per_element": of.report.total.coded_bits_per_element,
    }


def _tokens(of: Score) -> dict[str, list[Any]]:
    delta = (of.nll_coded - of.nll_dense).tolist()
    return {"kl": _short(of.kl), "agree": of.agree.int().tolist(), "nll_delta": [float(f"{x:.4g}") for x in delta]}


def _short(values: Tensor) -> list[float]:
    return [float(f"{x:.4g}") for x in values.tolist()]


def _bits(codec: Codec) -> list[dict[str, Any]]:
    """Mean bits of each head group, side by side and layer by layer."""
    return [
        {"layer": side.layer, "slot": side.slot, "heads": [round(group.mean, 4) for group in side.bits]}
        for side in anatomy(codec).sides
    ]
