"""Documents to score: technical prose and code that calibration never sees, or the user's own files.

prose: the evaluation half of Python's language reference · code: modules of the standard library
Which stretch of prose and which modules: the seed decides.
"""

import importlib.util
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from karhunen.calibration.texts import evaluation_text, read_texts
from karhunen.evaluation.score import Document

MODULES = ("argparse", "tarfile", "inspect", "doctest", "pickletools", "turtle", "zipfile", "pdb", "subprocess", "ssl")
CHARACTERS_PER_TOKEN = 12  # more than any tokenizer's mean: what is read of a module


def default_documents(
    tokenizer: Any, *, n_prose: int, n_code: int, prefill_tokens: int, scored_tokens: int, seed: int = 0
) -> list[Document]:
    """Prose first, then code; ValueError if there is less text than was asked for."""
    n = prefill_tokens + scored_tokens
    found = [
        *_first(_stretches(tokenizer, n, seed), n_prose, "prose"),
        *_first(_sources(tokenizer, n, seed), n_code, "code"),
    ]
    return [Document(name, torch.tensor(ids), prefill_tokens) for name, ids in found]


def file_documents(
    tokenizer: Any, paths: Sequence[Path], *, prefill_tokens: int, scored_tokens: int, limit: int | None = None
) -> list[Document]:
    """Each text file cut into documents of full length, `limit` of them at most; ValueError if none is long enough."""
    n = prefill_tokens + scored_tokens
    found: list[Document] = []
    longest = 0
    for i, text in enumerate(read_texts(paths)):
        ids = encode(tokenizer, text)
        longest = max(longest, len(ids))
        pieces = [ids[start : start + n] for start in range(0, len(ids) - n + 1, n)]
        found += [Document(f"text {i}.{j}", torch.tensor(p), prefill_tokens) for j, p in enumerate(pieces)]
    if not found:
        raise ValueError(
            f"no text is long enough: the longest has {longest} tokens, {prefill_tokens} to read and "
            f"{scored_tokens} to score were asked for"
        )
    return found[:limit]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids as the tokenizer begins a text."""
    return list(tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _stretches(tokenizer: Any, n: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Neighbouring paragraphs of `n` tokens together, from a place that the seed gives, round the whole text once."""
    paragraphs = evaluation_text().split("\n\n")
    start = random.Random(seed).randrange(len(paragraphs))
    held: list[str] = []
    first, length = start, 0
    for i in range(start, start + len(paragraphs)):
        held.append(paragraphs[i % len(paragraphs)])
        length += len(tokenizer(held[-1], add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
        if length < n:
            continue
        ids = encode(tokenizer, "\n\n".join(held))
        if len(ids) >= n:
            yield f"prose {first % len(paragraphs)}", ids[:n]
            held, first, length = [], i + 1, 0


def _sources(tokenizer: Any, n: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Modules that are long enough, in an order that the seed gives."""
    names = list(MODULES)
    random.Random(seed).shuffle(names)
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        text = Path(spec.origin).read_text(encoding="utf-8")
        ids = encode(tokenizer, text[: CHARACTERS_PER_TOKEN * n])
        if len(ids) >= n:
            yield f"code {name}", ids[:n]


def _first(found: Iterator[tuple[str, list[int]]], n: int, kind: str) -> list[tuple[str, list[int]]]:
    first = list(islice(found, n))
    if len(first) < n:
        raise ValueError(f"there are {len(first)} documents of {kind} of that length, {n} were asked for")
    return first
