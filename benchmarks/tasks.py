"""Which answers survive compression: tasks × recipes × rates, each cell a file of answers.

    texts ─▶ dense model, once ─▶ its answers            ┐
         └─▶ each recipe at each rate ─▶ coded answers ──┴─▶ results/tasks/… ─▶ results/measured/tasks-smollm2.json

What is there is not asked again, so a killed run goes on where it stopped. One cell is asked again from nothing, dense
model included, and compared with what was published, by

    python benchmarks/tasks.py --cell "passkeys 1000" karhunen 8

All cells, then table and picture (docs/tasks.md, docs/tasks.png):

    python benchmarks/tasks.py --statistics FOLDER && python benchmarks/task_tables.py
"""

import argparse
import json
import time
from dataclasses import asdict
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from karhunen.codec import Codec
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.results.rates import Rated, rated, settings
from karhunen.evaluation.runner import gathered
from karhunen.evaluation.tasks.asked import PreparedAsked, metrics_of
from karhunen.evaluation.tasks.kinds import Kind
from karhunen.fitting import fit
from karhunen.hf.describe import identity_of
from karhunen.hf.embedded import load
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics
from karhunen.statistics.gathered import LayerStatistics, Statistics

WINDOW = (4, 128)
SHORT = (
    Kind("documents", 1000, n_texts=20, n_each=5), Kind("passkeys", 1000), Kind("calls", 1000), Kind("copying", 1000),
    Kind("code", 1000), Kind("passkeys", 500), Kind("passkeys", 2000, n_texts=5),
)  # fmt: skip
LONG = (Kind("passkeys", 4000, n_texts=3), Kind("passkeys", 7500, n_texts=2))
BEYOND = (Kind("chat", 1000, n_texts=5, n_each=8), Kind("lists", 1000, n_texts=5), Kind("sums", 1000, n_texts=5))
"""Asked of the dense model alone, which fails them."""
SUITE = (*SHORT, *LONG)
CELLS: tuple[tuple[str, int], ...] = (
    ("karhunen", 8), ("int4", 4), ("spectra", 8), ("nova_kv", 8), ("karhunen", 16), ("kivi", 8), ("snapkv", 8),
    ("karhunen", 12), ("turboquant_4bit", 4), ("turboquant_3bit", 5), ("spectra", 12), ("nova_kv", 12),
    ("karhunen", 4), ("kivi", 4), ("spectra", 4), ("nova_kv", 4), ("snapkv", 4),
)  # fmt: skip
FIRST = 10
ROUNDS = (
    (SHORT, 0, 2, FIRST), (LONG, 0, 1, FIRST // 2), (SHORT, 2, 5, FIRST), (SHORT, 5, 20, FIRST), (LONG, 1, 3, FIRST),
    (SUITE, 0, 20, len(CELLS)),
)  # fmt: skip
"""Some texts of every cell before the next texts of any, the first cells in their order before the others: what exists
is a comparison whenever time ends."""


def main() -> None:
    """Ask what is missing, or one cell again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--statistics", type=Path, help="of the model, as `karhunen calibrate` keeps them; else measured"
    )
    parser.add_argument("--results", type=Path, default=Path("results/tasks"))
    parser.add_argument("--json", type=Path, default=Path("results/measured/tasks-smollm2.json"))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell after so many")
    parser.add_argument("--recipe", nargs="+", help="ask these alone, beside another run; the file holds what is there")
    parser.add_argument("--cell", nargs=3, metavar=("TASK", "RECIPE", "RATE"), help="ask this one again, from nothing")
    given = parser.parse_args()
    known = {task.name: task for task in SUITE}
    if given.cell and given.cell[0] not in known:
        parser.error(f"unknown task {given.cell[0]!r}; known: {', '.join(known)}")
    if given.cell and not given.cell[2].isdecimal():
        parser.error(f"rate {given.cell[2]!r} is not a whole number of times, such as 8")
    cells = [(given.cell[1], int(given.cell[2]))] if given.cell else list(CELLS)
    try:
        made = {(name, rate, task.name): cell_of(task, name, rate) for name, rate in cells for task in SUITE}
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    model, tokenizer = load(given.model)
    if given.cell:
        again(model, tokenizer, known[given.cell[0]], made[(*cells[0], given.cell[0])], given)
        return
    runner = Runner(model, tokenizer, given)
    chosen = [cell for cell in cells if not given.recipe or cell[0] in given.recipe]
    for suite, first, end, n in ((BEYOND, 0, 5, 0), *ROUNDS):
        for name, rate in (("dense", 1), *chosen[:n]):
            for task in suite:
                for i in range(first, end):
                    if i < task.n_texts and not runner.one(task, name, rate, i, made.get((name, rate, task.name))):
                        collect(given.results, given.json, given.model)
                        return
    collect(given.results, given.json, given.model)


class Runner:
    """Asks what has no file yet, or one of other questions, until the time is over."""

    def __init__(self, model: Any, tokenizer: Any, given: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.given = model, tokenizer, given
        self.start = time.perf_counter()
        self.codec: tuple[str, Codec] | None = None
        self.inputs: dict[tuple[str, int], str] = {}

    def one(self, task: Kind, name: str, rate: int, i: int, one: Rated | None) -> bool:
        """One text of one cell; False if the time is over."""
        file = file_of(self.given.results, task, name, rate, i)
        if file.is_file() and json.loads(file.read_text(encoding="utf-8"))["inputs"] == self._inputs(task, i):
            return True
        if time.perf_counter() - self.start > 60 * self.given.minutes:
            return False
        prepared = task.prepare_text(self.model, self.tokenizer, 0, i)
        prepared.keep_in(self.given.results / "dense")
        if one is None:
            right = prepared.dense_scores()
            body: dict[str, Any] = {"right": right, "inputs": prepared.inputs}
            said = f"dense {sum(right) / len(right):.2f}"
        else:
            if self.codec is None or self.codec[0] != one.text:
                self.codec = one.text, self._codec(one)
            body = asked(prepared, self.codec[1])
            said = summary(body["answers"])
        write(file, {**body, "made": asdict(provenance())})
        print(f"{time.perf_counter() - self.start:5.0f} s  {task.name:16} {i} {name}@{rate}  {said}", flush=True)
        return True

    def _inputs(self, task: Kind, i: int) -> str:
        """What the questions of a text are now: answers to others are asked again."""
        if (task.name, i) not in self.inputs:
            self.inputs[task.name, i] = task.prepare_text(self.model, self.tokenizer, 0, i).inputs
        return self.inputs[task.name, i]

    def _codec(self, one: Rated) -> Codec:
        return codec_of(self.model, self.tokenizer, one, self.given, self.given.results / "codecs")


def file_of(results: Path, task: Kind, name: str, rate: int, i: int) -> Path:
    """Where the answers to the questions of one text lie."""
    return results / task.name.replace(" ", "-") / f"{name}@{rate}" / f"{i}.json"


def cell_of(task: Kind, name: str, rate: int) -> Rated:
    """A recipe at a rate, with the window that all have. What evicts keeps the rate's share of the task's tokens."""
    if name == "snapkv":
        text = f"snapkv:kept={task.n_tokens // rate}"
        return Rated(name, rate, text, make(text))
    (one,) = rated([name], (rate,), WINDOW)
    if one.rate != rate:
        raise ValueError(f"{name} has no settings at {rate} times; it lists {', '.join(map(str, settings(name)))}")
    return one


def codec_of(model: Any, tokenizer: Any, one: Rated, given: argparse.Namespace, kept: Path | None) -> Codec:
    """Fitted now, or as an earlier run left it. Statistics that were given are taken as they are, others measured."""
    folder = None if kept is None else kept / one.recipe.fingerprint()
    if folder is not None and folder.is_dir():
        return Codec.from_pretrained(folder)
    if not one.recipe.needs():
        statistics = shapes_of(model)
    elif given.statistics:
        statistics = load_statistics(given.statistics)
    else:
        own = given.results / "statistics"
        statistics = gathered(model, tokenizer, [one.recipe], own, 16384, partial(print, "        ", flush=True))
    codec = fit(one.recipe, statistics)
    if folder is not None:
        codec.save_pretrained(folder)
    return codec


def shapes_of(model: Any) -> Statistics:
    """Statistics of nothing, for what needs none."""
    identity = identity_of(model)
    return Statistics(identity, {i: LayerStatistics() for i in range(len(identity.layers))})


def asked(prepared: PreparedAsked, codec: Codec) -> dict[str, Any]:
    """The answers of a cell, and what the cache of its last text held."""
    start = time.perf_counter()
    found = prepared.measure(codec)
    held = found["cache"]
    return {
        "inputs": prepared.inputs, "answers": found["answers"], "bytes": held["bytes"],
        "coded_bits_per_element": held["coded_bits_per_element"], "seconds": time.perf_counter() - start,
    }  # fmt: skip


def again(model: Any, tokenizer: Any, task: Kind, one: Rated, given: argparse.Namespace) -> None:
    """A cell from nothing: nothing that an earlier run left is read, but for the statistics."""
    published = json.loads(given.json.read_text(encoding="utf-8"))["cells"] if given.json.is_file() else []
    key = task.name, one.name, one.rate
    was = next((cell for cell in published if (cell["task"], cell["recipe"], cell["rate"]) == key), None)
    codec = codec_of(model, tokenizer, one, given, None)
    found = asked(task.prepare(model, tokenizer, 0, was and was["n_texts"]), codec)
    print(f"{task.name}, {one.text}: {summary(found['answers'])}, {found['seconds']:.0f} s")
    if was:
        mine = bits([answer["coded_score"] for answer in found["answers"]])
        differ = sum(a != b for a, b in zip(mine, was["right"], strict=True))
        print(f"published: {was['score']:.3f}; {differ} of {len(mine)} questions end otherwise here")


def collect(results: Path, file: Path, model: str) -> None:
    """All cells in one file, without their answers; right ones are told as a digit for each question."""
    dense: dict[str, Any] = {}
    cells: list[dict[str, Any]] = []
    for task in (*SUITE, *BEYOND):
        if firsts := _held(results, task, "dense", 1):
            right = [one for first in firsts for one in first["right"]]
            dense[task.name] = {
                "n_texts": len(firsts), "score": sum(right) / len(right), "right": bits(right),
                "commit": firsts[-1]["made"]["commit"],
            }  # fmt: skip
        for name, rate in CELLS:
            if parts := _held(results, task, name, rate):
                cells.append({"task": task.name, "recipe": name, "rate": rate, **_joined(parts)})
                cells[-1]["text"] = cell_of(task, name, rate).text
    body = {"model": model, "window": list(WINDOW), "made": asdict(provenance()), "dense": dense, "cells": cells}
    write(file, body)


def _held(results: Path, task: Kind, name: str, rate: int) -> list[dict[str, Any]]:
    """Of the first texts, as far as all of them are there."""
    files = [file_of(results, task, name, rate, i) for i in range(task.n_texts)]
    there = list(takewhile(Path.is_file, files))
    return [json.loads(file.read_text(encoding="utf-8")) for file in there]


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    answers = [answer for part in parts for answer in part["answers"]]
    metrics = metrics_of(answers)
    depths = [answer["depth"] for answer in answers if "depth" in answer]
    return {
        "n_texts": len(parts),
        **{key: metrics[key] for key in ("score", "score_low", "score_high", "n_questions", "same", "similarity")},
        "right": bits([answer["coded_score"] for answer in answers]),
        **({"depths": depths} if depths else {}),
        **{key: parts[-1][key] for key in ("coded_bits_per_element", "bytes")},
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "commit": parts[-1]["made"]["commit"],
    }


def bits(right: list[bool]) -> str:
    """A digit for each question."""
    return "".join("1" if one else "0" for one in right)


def summary(answers: list[dict[str, Any]]) -> str:
    """For the terminal."""
    metrics = metrics_of(answers)
    return ", ".join(f"{key} {metrics[key]:.3f}" for key in ("score", "dense_score", "same", "similarity"))


def write(file: Path, body: dict[str, Any]) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(body, indent=None if "answers" in body else 1) + "\n", encoding="utf-8")
    part.rename(file)


if __name__ == "__main__":
    main()
