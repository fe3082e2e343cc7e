"""Documents to score: technical prose, code and literature that calibration never sees, or the user's own files.

                 development (to choose settings on)        test (to publish)
    prose        first half of the evaluation text          second half
    code         modules of the standard library            other modules
    literature   Shakespeare                                Carroll and Milton in turn

No split shares a paragraph or a module with the other, nor with the calibration text. The seed decides where a stretch
of prose or literature begins, and the order of the modules.
"""

import importlib.util
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from karhunen.calibration.texts import evaluation_text, read_texts
from karhunen.device import HOST
from karhunen.evaluation.literature import work
from karhunen.evaluation.scores.score import Document

Split = Literal["development", "test"]
SPLITS: tuple[Split, ...] = ("development", "test")

MODULES: dict[Split, tuple[str, ...]] = {
    "development": (
        "argparse", "tarfile", "inspect", "doctest", "pickletools", "turtle", "zipfile", "pdb", "subprocess", "ssl",
    ),
    "test": (
        "typing", "enum", "logging", "ipaddress", "pickle", "threading", "smtplib", "ftplib", "imaplib", "plistlib",
        "functools", "traceback", "dataclasses", "platform", "http.client", "xmlrpc.client",
    ),
}  # fmt: skip
"""Of at least 6,000 tokens each in every Python from 3.11 on."""
WORKS: dict[Split, tuple[str, ...]] = {"development": ("asyoulik",), "test": ("alice29", "plrabn12")}
CHARACTERS_PER_TOKEN = 12  # more than any tokenizer's mean: what is read of a module


def default_documents(
    tokenizer: Any,
    split: Split,
    *,
    n_prose: int,
    n_code: int,
    n_literature: int,
    prefill_tokens: int,
    scored_tokens: int,
    seed: int = 0,
) -> list[Document]:
    """Prose first, then code, then literature; ValueError if there is less text than was asked for.

    Literature is downloaded at its first use, if any is asked for.
    """
    n = prefill_tokens + scored_tokens
    found = [
        *_first(_stretches(tokenizer, prose(split), "\n\n", n, seed), n_prose, "prose"),
        *_first(_sources(tokenizer, MODULES[split], n, seed), n_code, "code"),
        *(_first(_literature(tokenizer, split, n, seed), n_literature, "literature") if n_literature else ()),
    ]
    return [Document(name, torch.tensor(ids, device=HOST), prefill_tokens) for name, ids in found]


def prose(split: Split) -> tuple[str, ...]:
    """Paragraphs of a half of the evaluation text; one that stands in both is for development only."""
    paragraphs = evaluation_text().split("\n\n")
    ends = list(accumulate(map(len, paragraphs)))
    n = bisect_left(ends, ends[-1] / 2) + 1
    used = set(paragraphs[:n])
    return tuple(paragraphs[:n] if split == "development" else (p for p in paragraphs[n:] if p not in used))


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
        found += [Document(f"text {i}.{j}", torch.tensor(p, device=HOST), prefill_tokens) for j, p in enumerate(pieces)]
    if not found:
        raise ValueError(
            f"no text is long enough: the longest has {longest} tokens, {prefill_tokens} to read and "
            f"{scored_tokens} to score were asked for"
        )
    return found[:limit]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids as the tokenizer begins a text."""
    return list(tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _stretches(
    tokenizer: Any, pieces: Sequence[str], between: str, n: int, seed: int, kind: str = "prose"
) -> Iterator[tuple[str, list[int]]]:
    """Neighbouring pieces of `n` tokens together, from a place that the seed gives, round the whole text once."""
    start = random.Random(seed).randrange(len(pieces))
    held: list[str] = []
    first, length = start, 0
    for i in range(start, start + len(pieces)):
        held.append(pieces[i % len(pieces)])
        length += len(tokenizer(held[-1], add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
        if length < n:
            continue
        ids = encode(tokenizer, between.join(held))
        if len(ids) >= n:
            yield f"{kind} {first % len(pieces)}", ids[:n]
            held, first, length = [], i + 1, 0


def _literature(tokenizer: Any, split: Split, n: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Stretches of whole lines, from each work in turn."""
    works = [
        _stretches(tokenizer, work(name).splitlines(), "\n", n, seed, f"literature {name}") for name in WORKS[split]
    ]
    missing = ("", [])
    for turn in zip_longest(*works, fillvalue=missing):
        yield from (found for found in turn if found is not missing)


def _sources(tokenizer: Any, modules: Sequence[str], n: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Modules that are long enough, in an order that the seed gives."""
    names = list(modules)
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
