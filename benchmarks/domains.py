"""Calibrated here, read there: prose and code crossed, and short calibration on long context.

    calibration on prose ─┐
    calibration on code  ─┼─▶ scored on prose, on code, on literature
    calibration on both  ─┘   and, from 2,048 tokens at a time, at a context of 8k

Recipes are scored by `karhunen evaluate`'s own runner, one JSON each; what exists is not run again.

    python benchmarks/domains.py --model smollm2 --results results/domains --json results/measured/domains-smollm2.json
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.texts import calibration_code, calibration_prose, calibration_text
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.results.rates import RATES, rated
from karhunen.evaluation.results.result import Result, read_result
from karhunen.evaluation.results.rows import row_of
from karhunen.evaluation.runner import Plan, evaluate
from karhunen.evaluation.tasks.texts import Texts
from karhunen.hf.embedded import load
from karhunen.statistics.artifact import save_statistics

KINDS = ("prose", "code", "literature")
SOURCES = {"prose": calibration_prose, "code": calibration_code, "both": calibration_text}


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--recipe", nargs="+", default=["karhunen", "spectra", "nova_kv"])
    parser.add_argument("--rate", type=int, nargs="+", default=[8], choices=list(RATES))
    parser.add_argument("--results", type=Path, default=Path("results/domains"))
    parser.add_argument("--calibrate-on", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--long-tokens", type=int, default=7680, help="prefill of the long documents; 0: none")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    wanted = tuple(rated(given.recipe, given.rate, (4, 128)))
    held = []

    def loaded() -> tuple:
        held[:] = held or [load(given.model)]
        return held[0]

    rows = []
    sizes = {"prefill_tokens": 2560, "scored_tokens": 384, "generated_tokens": 0}
    short = each_kind(sizes)
    long = {**sizes, "prefill_tokens": given.long_tokens}
    plans = [(source, short) for source in given.calibrate_on]
    if given.long_tokens and "both" in given.calibrate_on:
        plans.append(("both", each_kind(long)))
    for source, tasks in plans:
        folder = given.results / "statistics" / f"{given.model}-{source}"
        if not (folder / "config.json").is_file():
            needs = {need for each in wanted for need in each.recipe.needs()}
            print(f"calibrating on {source}", flush=True)
            model, tokenizer = loaded()
            save_statistics(calibrate(model, SOURCES[source](), needs, tokenizer), folder)
        plan = Plan(given.model, "float32", tasks, wanted, given.results, folder, fixed_statistics=True)
        outcome = evaluate(plan, loaded, on_stage=partial(print, flush=True))
        rows += [row(source, read_result(path)) for path in outcome.paths]
    rows.sort(key=lambda r: (r["prefill_tokens"], r["scored_on"], r["calibrated_on"], r["bits_per_element"]))
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"made": asdict(provenance()), "model": given.model, "rows": rows}, indent=1))


def each_kind(sizes: dict) -> tuple[Texts, ...]:
    """A test document of each kind, one a task."""
    return tuple(Texts(**{f"n_{kind}": int(kind == one) for kind in KINDS}, **sizes) for one in KINDS)


def row(source: str, result: Result) -> dict:
    """Of the table."""
    task = result["configuration"]["task"]
    scored_on = next(kind for kind in KINDS if task[f"n_{kind}"])
    where = {"calibrated_on": source, "scored_on": scored_on, "prefill_tokens": task["prefill_tokens"]}
    return {**where, **row_of(result).to_dict()}


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| calibrated on | scored on | prefill | recipe | BPE | KL (95 %) | top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['calibrated_on']} | {r['scored_on']} | {r['prefill_tokens']:,} | {r['text']} | "
        f"{r['bits_per_element']:.3f} | {r['kl']:.4f} ({r['kl_low']:.4f}–{r['kl_high']:.4f}) | {r['top1']:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
