"""Every family by every recipe, on tiny models of random weights: the table of docs/reliability.md.

    python -m benchmarks.families                       # all cells: about 15 minutes of a processor
    python -m benchmarks.families --minutes 7           # so many of it; run again to go on
    python -m benchmarks.families --only Gemma          # families whose name holds the word, made anew
    python -m benchmarks.families --write               # also writes the table into docs/reliability.md

Cells are kept in results/reliability/families.json, each with the commit that it was made at; `--redo` makes all anew.
Exit code 1 if a cell is wrong. What is tried in a cell stands in tests/hf/cells.py.
"""

import argparse
import json
import logging
import re
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.hf.cells import CLOSE, READ, USUAL, Cell, cell_of, forget
from tests.hf.families import MODELS

from karhunen.evaluation.results.provenance import provenance

KEPT = Path("results/reliability/families.json")
PAGE = Path("docs/reliability.md")
BEGIN, END = "<!-- karhunen families: begin -->", "<!-- karhunen families: end -->"


def main() -> int:
    """Make what is missing, print what is wrong."""
    reading = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reading.add_argument("--only", default="", help="part of a family's name; its cells are made anew")
    reading.add_argument("--recipe", action="append", choices=sorted(USUAL), help="repeatable; all")
    reading.add_argument("--minutes", type=float, default=1e9, help="of the processor; the rest is left for later")
    reading.add_argument("--redo", action="store_true", help="forget what is kept")
    reading.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    given = reading.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    if given.redo:
        KEPT.unlink(missing_ok=True)
    made: dict[str, Any] = _kept() if KEPT.is_file() else {}
    commit, end = provenance().commit, time.process_time() + 60 * given.minutes
    for family in sorted(MODELS, key=lambda name: "heads of" in name):  # wide heads take longest
        if given.only not in family:
            continue
        for recipe in given.recipe or USUAL:
            key = f"{family} / {recipe}"
            if (key in made and not given.only) or time.process_time() > end:
                continue
            cell = asdict(_cell(family, recipe)) | {"commit": commit}
            if cell["wrong"]:
                print(f"{key}: {cell['wrong']}", flush=True)
            made = (_kept() if KEPT.is_file() else {}) | {key: cell}  # another process may make others meanwhile
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            KEPT.write_text(json.dumps(made, indent=1) + "\n")
        forget()
    n_missing = sum(f"{family} / {recipe}" not in made for family in MODELS for recipe in USUAL)
    wrong = [key for key, cell in made.items() if cell["wrong"]]
    print(f"{len(made)} cells, {n_missing} not made yet, {len(wrong)} wrong")
    if given.write:
        _write(made)
    return 1 if wrong else 0


def _kept() -> dict[str, Any]:
    return json.loads(KEPT.read_text())


def _cell(family: str, recipe: str) -> Cell:
    try:
        return cell_of(family, recipe)
    except Exception as error:  # noqa: BLE001  (one cell is no reason to make no table)
        traceback.print_exc(limit=-2)
        return Cell(family, recipe, wrong=f"{type(error).__name__}: {error}")


def _write(made: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(made)}\n{END}{after}", encoding="utf-8")


def table(made: dict[str, Any]) -> str:
    """Markdown: a row per family, a column per recipe, reasons of refusals below."""
    reasons: dict[str, int] = {}
    rows = [f"| family | {' | '.join(f'`{name}`' for name in USUAL)} |", f"|---|{'--:|' * len(USUAL)}"]
    for family in MODELS:
        cells = [_shown(made.get(f"{family} / {recipe}"), reasons) for recipe in USUAL]
        rows.append(f"| {family} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    apart = [cell["apart"] for cell in made.values() if cell["apart"] is not None and not cell["wrong"]]
    commits = sorted({cell["commit"] for cell in made.values()})
    said = (
        f"A number is the largest error of a logit at 8 bits, by the largest logit; {CLOSE:g} is the limit. Read from "
        f"bytes and decoded, logits at the usual rates differ by {max(apart, default=0.0):.1g} at most (limit "
        f"{READ:.1g}). † attention that cannot be exchanged: decoded only. A number in brackets is a refusal, before "
        f"the model has run over any text:"
    )
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    made_at = f"`python -m benchmarks.families`, {versions}, commit {', '.join(f'`{c[:10]}`' for c in commits)}."
    return "\n".join([*rows, "", said, "", *notes, "", made_at])


def _shown(cell: dict[str, Any] | None, reasons: dict[str, int]) -> str:
    if cell is None:
        return "not tried"
    if cell["wrong"]:
        return f"**wrong: {cell['wrong']}**"
    if cell["refused"]:
        return f"[{reasons.setdefault(_general(cell['refused']), len(reasons) + 1)}]"
    number = "exact" if cell["error"] == 0 else f"{cell['error']:.1g}"
    return number if cell["apart"] is not None else f"{number} †"


def _general(reason: str) -> str:
    """Without names of models and recipes, nor what exactly was to be measured, so that a reason is one note."""
    reason = re.sub(r"\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)", "the model", reason)
    reason = re.sub(r"^\w+ codes no layer of this \w+", "no layer would be coded", reason)
    reason = re.sub(r"^\w+ has no RoPE, so \w+", "the model has no RoPE, so what is asked", reason)
    reason = re.sub(r"^\w+ has no layer to measure", "no layer would be coded", reason)
    reason = re.sub(r" \((post-RoPE|block \d+)[^)]*\)", "", reason)
    return reason.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
