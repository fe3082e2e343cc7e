"""What a codec is calibrated on, and what it is worth where: built-in text, the model's own samples, and both.

    built-in text ── n tokens ─┐
                               ├─▶ statistics, which add up ─▶ codec ─▶ KL on development documents, by kind
    own samples   ── n tokens ─┘                 seconds of each, side by side

Every part is kept in a folder, and what is there is not made again; with --minutes it stops between two parts, to go on
at the next call.

    python benchmarks/calibration_text.py --work /tmp/own --json results/measured/calibration-text-smollm2.json
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch

from karhunen import fit, make
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.own_samples import own_samples
from karhunen.calibration.texts import calibration_text
from karhunen.calibration.tokens import sequences
from karhunen.evaluation.documents import default_documents
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.score import run_dense, score
from karhunen.hf.embedded import load
from karhunen.statistics.artifact import load_statistics, save_statistics

PARTS = {f"{source} {n}k": n * 1024 for source in ("built-in", "own") for n in (4, 8, 16)}
"""Tokens of each."""
MIXES = ("built-in 8k", "built-in 16k", "own 8k", "built-in 8k + own 8k", "built-in 16k + own 8k")
KINDS = ("prose", "code", "literature")


def main() -> None:
    """Make what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--recipe", default="karhunen:bits=2")
    parser.add_argument("--split", default="development", choices=("development", "test"))
    parser.add_argument("--documents", type=int, default=1, help="of each kind")
    parser.add_argument("--mix", nargs="+", default=MIXES, help=f"sums of {', '.join(PARTS)}")
    parser.add_argument("--prefill-tokens", type=int, default=2560)
    parser.add_argument("--scored-tokens", type=int, default=384)
    parser.add_argument("--work", type=Path, required=True, help="folder of samples, statistics and scores")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further part after so long")
    parser.add_argument("--json", type=Path)
    run = Run(parser.parse_args())
    for part in dict.fromkeys(part for mix in run.given.mix for part in mix.split(" + ")):
        run.statistics(part)
    run.score()
    print(table(run.given.mix, run.found["kl"], run.found["seconds"]))
    if run.given.json:
        made = {"made": asdict(provenance()), "model": run.given.model, "recipe": run.given.recipe, **run.found}
        run.given.json.write_text(json.dumps(made, indent=1))


class Run:
    """One call: what it was asked, what it found so far."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.start = time.monotonic()
        self.folder = given.work / given.model
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / f"found-{given.split}-{given.prefill_tokens}.json"
        self.found: dict[str, Any] = {"seconds": {}, "kl": {}}
        if self.file.exists():
            self.found = json.loads(self.file.read_text())
        self.model, self.tokenizer = load(given.model)
        self.recipe = make(given.recipe)
        self.codecs: dict[str, Any] = {}

    def statistics(self, part: str) -> Any:
        """Of one part; kept."""
        folder = self.folder / part.replace(" ", "-")
        if not (folder / "config.json").is_file():
            self.still()
            tokens = self.tokens(part)
            begun = time.perf_counter()
            save_statistics(calibrate(self.model, tokens, self.recipe.needs(), self.tokenizer), folder)
            self.keep("seconds", part, time.perf_counter() - begun)
        return load_statistics(folder)

    def tokens(self, part: str) -> list[torch.Tensor]:
        """The first tokens of a source."""
        n = PARTS[part]
        if not part.startswith("own"):
            return sequences(calibration_text(), self.tokenizer, 2048, n, 2)
        found, begun = list(self.folder.glob("own-samples-*")), time.perf_counter()
        pieces = own_samples(self.model, self.tokenizer, n, folder=self.folder)
        if list(self.folder.glob("own-samples-*")) != found:
            self.keep("seconds", f"drawing {part}", time.perf_counter() - begun)
        self.still()
        return pieces

    def score(self) -> None:
        """Every mix on every document."""
        counts = {f"n_{kind}": self.given.documents for kind in KINDS}
        sizes = {"prefill_tokens": self.given.prefill_tokens, "scored_tokens": self.given.scored_tokens}
        for document in default_documents(self.tokenizer, self.given.split, **counts, **sizes):
            missing = [mix for mix in self.given.mix if f"{mix} on {document.name}" not in self.found["kl"]]
            if not missing:
                continue
            self.still()
            dense = run_dense(self.model, document)
            for mix in missing:
                codec = self.codec(mix)
                self.keep("kl", f"{mix} on {document.name}", float(score(self.model, codec, dense).kl.mean()))

    def codec(self, mix: str) -> Any:
        """Fitted once a call."""
        if mix not in self.codecs:
            self.codecs[mix] = fit(self.recipe, reduce(add, map(self.statistics, mix.split(" + "))))
        return self.codecs[mix]

    def keep(self, kind: str, name: str, value: float) -> None:
        """Written down at once."""
        print(f"{name}: {value:.4g}", flush=True)
        self.found[kind][name] = value
        self.file.write_text(json.dumps(self.found, indent=1))

    def still(self) -> None:
        """Leaves if the time is up."""
        if time.monotonic() - self.start > 60 * self.given.minutes:
            sys.exit("time is up; call it again to go on")


def table(mixes: Sequence[str], kl: dict[str, float], seconds: dict[str, float]) -> str:
    """Markdown: KL by kind, and what calibration took."""
    lines = [f"| calibrated on | {' | '.join(KINDS)} | seconds |", "|---|--:|--:|--:|--:|"]
    for mix in mixes:
        means = []
        for kind in KINDS:
            found = [value for name, value in kl.items() if name.startswith(f"{mix} on {kind}")]
            means.append(f"{sum(found) / len(found):.4f}" if found else "")
        took = sum(value for name, value in seconds.items() if name.removeprefix("drawing ") in mix.split(" + "))
        lines.append(f"| {mix} | {' | '.join(means)} | {took:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
