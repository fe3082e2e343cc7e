"""Calibration text that the model writes itself: what it would say, of several kinds and languages.

prompt i ─▶ chat template, or the opening of a text where there is none ─▶ drawn at temperature 1, seed (seed, i) ─▶ ids

A model is served on text like its own. Prompts take turns from plain narrative to code, so that the first few of them
already hold both. What is done is kept in a folder, a batch at a time, and found again there.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from karhunen.device import HOST
from karhunen.hf.describe import identity_of
from karhunen.hf.drawing import continued
from karhunen.hf.generation import prompt_tokens
from karhunen.hf.probe import n_positions
from karhunen.values import fingerprint, refuse_unless_whole

SAMPLE_TOKENS = 1024  # of one sample, its prompt included
BATCH = 8  # samples drawn together: part of the definition, since sums of a batch round otherwise
LEAST_NEW_TOKENS = 64
SEED = 0

Progress = Callable[[int, int], None]


@final
@dataclass(frozen=True)
class Prompt:
    """What a chat model is asked, and how the same text begins for a model that only continues."""

    kind: str
    ask: str
    opening: str


PROMPTS = (
    Prompt(
        "novel",
        "Write the opening chapter of a long novel set in a village by the sea a hundred years ago.",
        "CHAPTER I\n\nIt was late in the autumn of that year when the old",
    ),
    Prompt(
        "Python",
        "Write a complete Python module with classes, docstrings and error handling that reads and checks CSV files.",
        '"""Reading and checking tables of text."""\n\nimport csv\nfrom pathlib import Path\n\n\nclass Table:\n',
    ),
    Prompt(
        "conversation",
        "Write a long conversation between two old friends who meet by chance at a railway station.",
        '"I did not expect to see you here," she said. "How many years has it been?"\n\n',
    ),
    Prompt(
        "German",
        "Schreibe einen ausführlichen Aufsatz auf Deutsch über die Geschichte einer alten Stadt.",
        "Die Stadt liegt an einem breiten Fluss, und ihre Geschichte beginnt lange vor",
    ),
    Prompt(
        "manual",
        "Write the reference manual of a command-line tool for backups: every option, with examples.",
        "NAME\n    backup - copy files to another place and keep what changed\n\nSYNOPSIS\n    backup [OPTIONS]",
    ),
    Prompt(
        "letter",
        "Write a long personal letter from a traveller to her sister at home.",
        "My dear sister,\n\nYour letter reached me only yesterday, and I",
    ),
    Prompt(
        "science",
        "Explain in detail how photosynthesis works, for a student who knows some chemistry.",
        "Photosynthesis is the process by which plants turn light into chemical energy. In the first",
    ),
    Prompt(
        "French",
        "Écris un long récit en français sur un voyage à travers les montagnes.",
        "Le lendemain matin, nous partîmes avant le lever du soleil, et la route",
    ),
    Prompt(
        "news",
        "Write a long newspaper report about a town council that argues over a new bridge, with quotations.",
        "The town council voted on Tuesday to delay the building of a new bridge after residents",
    ),
    Prompt(
        "C",
        "Write a C program that implements a hash table with tests. Show all of its code.",
        "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n\nstruct entry {\n",
    ),
    Prompt(
        "verse",
        "Write a scene of a play in verse in which a queen and her fool disagree about mercy.",
        "ACT I. SCENE I.\n\nEnter the QUEEN and her FOOL.\n\nQUEEN. What say'st thou,",
    ),
    Prompt(
        "Spanish",
        "Escribe en español una explicación larga de cómo funciona la economía de un país.",
        "La economía de un país depende de muchas cosas, pero sobre todo de",
    ),
    Prompt(
        "contract",
        "Draft a complete rental contract for a house, with numbered clauses.",
        "THIS AGREEMENT is made between the Landlord and the Tenant.\n\n1. Definitions. In this Agreement,",
    ),
    Prompt(
        "mathematics",
        "Solve five problems of algebra step by step and explain each step.",
        "Problem 1. Find all real numbers x such that x^2 - 5x + 6 = 0.\n\nSolution. We",
    ),
    Prompt(
        "Chinese",
        "请用中文写一篇长文章，介绍一个城市的历史、饮食和人们的生活。",
        "这座城市坐落在河边，已有一千多年的历史。每天清晨，",
    ),
    Prompt(
        "data",
        "Write a long JSON document that describes the stock of a bookshop, then explain its fields.",
        '{\n  "shop": "Corner Books",\n  "books": [\n    {"title": "',
    ),
)


def own_samples(
    model: Any,
    tokenizer: Any,
    n_tokens: int,
    *,
    seed: int = SEED,
    folder: Path | str | None = None,
    progress: Progress | None = None,
) -> list[Int[Tensor, " _"]]:
    """Token ids that the model wrote: `n_tokens` in all, prompts included, at most SAMPLE_TOKENS each.

    The same seed gives the same text on the same machine; other processors round logits otherwise, and a text may go on
    otherwise from there. With `folder`, batches that are done are kept there and an interrupted call goes on.
    `progress` is told (tokens done, tokens in all).

    ValueError for a number of tokens or a seed that is none, a missing tokenizer, and a model with too few positions.
    """
    refuse_unless_whole(own_samples=n_tokens, seed=seed)
    if n_tokens < 1 or seed < 0:
        raise ValueError(f"own_samples={n_tokens}, seed={seed}: use 1 token or more, and a seed of 0 or more")
    if tokenizer is None:
        raise ValueError("the model's own samples need its tokenizer; pass tokenizer=...")
    asked = [_ids(tokenizer, prompt) for prompt in PROMPTS]
    longest, unlike = max(map(len, asked)), max(map(len, asked)) - min(map(len, asked))
    room = min(SAMPLE_TOKENS, n_positions(model) - unlike)  # the longest prompt is continued as far as the shortest
    rows = [min(room, n_tokens - start) for start in range(0, n_tokens, room)] if room > 0 else []
    wanted = [asked[i % len(asked)] for i in range(len(rows))]
    if room < longest + LEAST_NEW_TOKENS:
        raise ValueError(
            f"the model has {n_positions(model)} positions, and its own samples take "
            f"{longest + unlike + LEAST_NEW_TOKENS} or more; calibrate it on text alone"
        )
    kept = None if folder is None else _Kept(Path(folder), _name(model, asked, seed))
    found: list[Int[Tensor, " _"]] = []
    total = sum(rows)
    for start in range(0, len(rows), BATCH):
        done = sum(rows[:start])
        if progress is not None:
            progress(done, total)
        part, lengths = wanted[start : start + BATCH], rows[start : start + BATCH]
        most = max(lengths)
        texts = None if kept is None else kept.load(start, len(part), most)
        if texts is None:
            texts = _drawn(model, tokenizer, part, most, (seed, start), _told(progress, done, most, len(part), total))
            if kept is not None:
                kept.save(start, texts, most)
        found += [torch.tensor(ids[:n], device=HOST) for ids, n in zip(texts, lengths, strict=True)]
    if progress is not None:
        progress(total, total)
    return found


def _drawn(
    model: Any, tokenizer: Any, prompts: list[list[int]], most: int, seeds: tuple[int, int], on_step: Any
) -> list[list[int]]:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    seed, start = seeds
    each = [_mixed(seed, start + i) for i in range(len(prompts))]
    n = max(1, most - min(map(len, prompts)))
    return continued(model, prompts, n, each, pad=0 if pad is None else int(pad), on_step=on_step)


def _told(progress: Progress | None, done: int, most: int, n_rows: int, total: int) -> Callable[[int], None] | None:
    """Steps of a batch as tokens of all."""
    if progress is None:
        return None
    end = min(total, done + most * n_rows) - 1
    return lambda n_steps: progress(min(done + n_steps * n_rows, end), total)


def _ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    chat = bool(getattr(tokenizer, "chat_template", None))
    return prompt_tokens(tokenizer, prompt.ask if chat else prompt.opening, chat=chat)[0].tolist()


def _mixed(seed: int, row: int) -> int:
    """A seed of its own for each sample: neighbouring ones of a generator are not independent by themselves."""
    return int.from_bytes(hashlib.sha256(f"own sample {seed} {row}".encode()).digest()[:7], "big")


def _name(model: Any, asked: list[list[int]], seed: int) -> str:
    """All that a sample depends on but its number: a longer set begins as a shorter one does."""
    return fingerprint((identity_of(model), str(asked), seed, SAMPLE_TOKENS, BATCH, str(model.dtype)))


@final
class _Kept:
    """Batches on disk, each a file that appears whole."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def _path(self, start: int, n_rows: int, most: int) -> Path:
        return self.folder / f"own-samples-{self.name}-{start:05d}-{n_rows}x{most}.json"

    def load(self, start: int, n_rows: int, most: int) -> list[list[int]] | None:
        """The texts of a batch; None if they are not there, or the file is damaged."""
        try:
            texts = json.loads(self._path(start, n_rows, most).read_text(encoding="utf-8"))
            whole = len(texts) == n_rows and all(isinstance(i, int) for text in texts for i in text)
        except (OSError, ValueError, TypeError):
            return None
        return texts if whole else None

    def save(self, start: int, texts: list[list[int]], most: int) -> None:
        """Beside its place first, then in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(start, len(texts), most)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(texts), encoding="utf-8")
        new.replace(path)
