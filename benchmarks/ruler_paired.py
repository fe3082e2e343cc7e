"""Do compressed caches still find RULER's needle? Recipes against the dense model, on the same questions.

    questions ─▶ dense model ─▶ right or wrong ┐
             └─▶ each recipe ─▶ right or wrong ─┴─▶ Wilson's interval, McNemar's exact test, one row each

Of RULER's kinds these are the ones that SmolLM2 without compression answers at every length that was tried
(results/measured/ruler-smollm2.json). Every cell is a result file as `karhunen evaluate` writes it; those that are
there are not asked again, so a killed run goes on.

    python benchmarks/ruler_paired.py --statistics FOLDER --json results/measured/ruler-paired-smollm2.json
    python benchmarks/ruler_paired.py --statistics FOLDER --kind niah_single_1 --tokens 500 --recipe karhunen --rate 8
"""

import argparse
import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.results.rates import rated
from karhunen.evaluation.results.result import read_result
from karhunen.evaluation.runner import Plan, evaluate
from karhunen.evaluation.scores.shares import mcnemar, wilson
from karhunen.evaluation.tasks.ruler import KINDS, Ruler
from karhunen.hf.embedded import load

ASKED = ("niah_single_1", "niah_single_2")
LENGTHS = (500, 1000, 1500)
RECIPES = ("int4", "kivi", "turboquant_4bit", "turboquant_3bit", "spectra", "nova_kv", "karhunen")
RATES = (4, 8, 12)
WINDOW = (4, 128)


def main() -> None:
    """Ask, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=ASKED)
    parser.add_argument("--tokens", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--recipe", nargs="+", default=RECIPES)
    parser.add_argument("--rate", nargs="+", type=int, default=RATES)
    parser.add_argument("--questions", type=int, default=30, help="of each kind and length")
    parser.add_argument(
        "--statistics", type=Path, help="of the model, as `karhunen calibrate` keeps them; else measured"
    )
    parser.add_argument("--results", type=Path, default=Path("results/ruler"))
    parser.add_argument("--json", type=Path, help="the rows, with commit and machine")
    given = parser.parse_args()
    start = time.perf_counter()
    try:
        plan = plan_of(given)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    outcome = evaluate(plan, partial(load, given.model), on_stage=partial(print, flush=True))
    rows = sorted((row_of(read_result(path)) for path in outcome.paths), key=lambda row: (row["task"], row["bits"]))
    for row in rows:
        print(line(row))
    print(f"{len(outcome.made)} cells asked, {len(outcome.kept)} there; {time.perf_counter() - start:.0f} s")
    if given.json:
        body = {"model": given.model, "questions": given.questions, "made": asdict(provenance()), "rows": rows}
        given.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def plan_of(given: argparse.Namespace) -> Plan:
    """Tasks × recipes; ValueError on what there is not."""
    tasks = tuple(Ruler(kind, n, n_questions=given.questions) for n in given.tokens for kind in given.kind)
    return Plan(
        model_name=given.model,
        dtype="float32",
        tasks=tasks,
        rated=tuple(rated(given.recipe, given.rate, WINDOW)),
        results=given.results,
        statistics=given.statistics or given.results / "statistics",
        fixed_statistics=given.statistics is not None,
    )


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """Shares of questions whose every answer was found, and how likely they part by chance."""
    coded, dense = ([answer[name] == 1 for answer in result["answers"]] for name in ("coded_score", "dense_score"))
    low, high = wilson(sum(coded), len(coded))
    made = result["made"]
    return {
        "task": result["configuration"]["task"]["name"],
        "recipe": result["configuration"]["text"],
        "bits": result["cache"]["coded_bits_per_element"],
        "n_questions": len(coded),
        "score": sum(coded) / len(coded),
        "low": low,
        "high": high,
        "dense": sum(dense) / len(dense),
        "p": mcnemar(coded, dense),
        "conclusive": result["metrics"]["conclusive"],
        "seconds": round(made["measure_seconds"], 1),
        "commit": made["commit"],
    }


def line(row: dict[str, Any]) -> str:
    """For the terminal."""
    about = "" if row["conclusive"] else "  the dense model fails it"
    return (
        f"{row['task']:26} {row['recipe']:44} {row['bits']:6.3f} bits  {row['score']:.2f} ({row['low']:.2f} to "
        f"{row['high']:.2f})  dense {row['dense']:.2f}  p {row['p']:.3f}{about}"
    )


if __name__ == "__main__":
    main()
