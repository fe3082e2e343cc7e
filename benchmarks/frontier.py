"""What error costs in time: KL against the time of a whole decode step, for the ways in which the recipe can spend it.

    kinds of table   free, overlapping, additive            (`karhunen:tables=`)
    frames           blocks of 64, 128 and 256 tokens       (`karhunen:block_tokens=`)
    heads            one at a time, or a layer's joined     (`karhunen:joined=true`)

All at the same bytes, calibrated on the same text, scored on the development documents by `karhunen evaluate`'s own
runner; what exists is not run again. A step is timed on one thread, in turn with transformers' own two caches, and
shown as a multiple of the faster of them, so that a machine whose speed changes between two variants slows both.

    python benchmarks/frontier.py --json results/measured/frontier.json --plot docs/frontier.png
    python benchmarks/frontier.py --of results/measured/frontier.json --plot docs/frontier.png      # nothing is run
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from karhunen.calibration.texts import evaluation_text
from karhunen.evaluation.results.plots import COLOURS, MARKERS
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.results.rates import Rated
from karhunen.evaluation.results.result import read_result
from karhunen.evaluation.results.rows import row_of
from karhunen.evaluation.runner import Plan, evaluate, gathered
from karhunen.evaluation.speed.step_speed import measure
from karhunen.evaluation.tasks.texts import Texts
from karhunen.fitting import fit
from karhunen.hf.embedded import load
from karhunen.recipes import make

VARIANTS = {
    "free": {},
    "overlapping": {"tables": "overlapping"},
    "additive": {"tables": "additive"},
    "free, blocks of 128": {"block_tokens": 128},
    "free, blocks of 256": {"block_tokens": 256},
    "free, heads joined": {"joined": True},
    "additive, heads joined": {"joined": True, "tables": "additive"},
    "free, heads joined, blocks of 256": {"joined": True, "block_tokens": 256},
}
"""Options of the recipe beside its bits, by what they are called in table and picture."""


def main() -> None:
    """Score what is missing, time every variant, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--bits", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 7168], help="contexts of the timed step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=Path("results/frontier"))
    parser.add_argument("--literature", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--of", type=Path, help="show what an earlier run wrote with --json; nothing is run")
    given = parser.parse_args()
    document = json.loads(given.of.read_text()) if given.of else measured(given)
    print(f"\n{table(document['rows'])}\n")
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    if given.plot:
        figure_of(document).savefig(given.plot, dpi=150)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Every variant's score, and its step after each context."""
    torch.set_num_threads(1)
    rated = tuple(
        Rated("karhunen", round(16 / given.bits), name, make("karhunen", bits=given.bits, **options))
        for name, options in VARIANTS.items()
    )
    plan = Plan(
        model_name=given.model,
        dtype="float32",
        tasks=(
            Texts(
                split="development", n_prose=1, n_code=1, n_literature=given.literature, prefill_tokens=2048,
                scored_tokens=256, generated_tokens=0,
            ),
        ),
        rated=rated,
        results=given.results,
        statistics=given.results / "statistics" / f"{given.model}-float32",
    )  # fmt: skip
    say = partial(print, flush=True)
    outcome = evaluate(plan, partial(load, given.model), on_stage=say)
    for name, reason in outcome.refused.items():
        say(f"not measured: {name}: {reason}")
    scored = {str(result["configuration"]["text"]): row_of(result) for result in map(read_result, outcome.paths)}
    model, tokenizer = load(given.model)
    statistics = gathered(model, tokenizer, [r.recipe for r in rated], plan.statistics, plan.calibration_tokens, say)
    ids = tokenizer(evaluation_text(), return_tensors="pt", truncation=False, verbose=False)["input_ids"][0]
    rows: list[dict[str, Any]] = []
    for one in rated:
        if one.text not in scored:
            continue
        codec = fit(one.recipe, statistics)
        score = scored[one.text]
        row = {"variant": one.text, "kl": score.kl, "kl_low": score.kl_low, "kl_high": score.kl_high}
        row |= {"top1": score.top1, "bits_per_element": score.bits_per_element, "table_bytes": codec.table_bytes()}
        for n in given.tokens:
            say(f"a step after {n:,} tokens: {one.text}")
            timed = measure(model, codec, ids[:n], given.rounds)
            rows.append({**row, "tokens": n} | {k: timed[k] for k in ("milliseconds", "fastest_dense", "speed_up")})
    return {"made": asdict(provenance()), "threads": 1, "rounds": given.rounds, "rows": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per variant, beside its KL the speed of a step, × the fastest dense one."""
    lengths = sorted({row["tokens"] for row in rows})
    head = ["variant", "KL (95 %)", "bits", "tables"] + [f"speed after {n:,} tokens" for n in lengths]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = {row["tokens"]: row for row in rows if row["variant"] == name}
        one = mine[lengths[0]]
        cells = [f"{mine[n]['speed_up']:.2f}" for n in lengths]
        kl = f"{one['kl']:.4f} ({one['kl_low']:.4f}–{one['kl_high']:.4f})"
        size = f"{one['table_bytes'] / 1e6:.1f} MB"
        lines.append("| " + " | ".join([name, kl, f"{one['bits_per_element']:.3f}", size, *cells]) + " |")
    return "\n".join(lines)


def figure_of(document: dict[str, Any]) -> Figure:
    """KL against the time of a step, × the fastest dense one: one panel for each context."""
    rows: list[dict[str, Any]] = document["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    names = list(dict.fromkeys(row["variant"] for row in rows))
    figure = Figure(figsize=(5.5 * len(lengths), 4.4), layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, n in zip(panels, lengths, strict=True):
        for i, name in enumerate(names):
            row = next(row for row in rows if (row["variant"], row["tokens"]) == (name, n))
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            interval = [[row["kl"] - row["kl_low"]], [row["kl_high"] - row["kl"]]]
            axes.errorbar(1 / row["speed_up"], row["kl"], yerr=interval, linestyle="", label=name, **look)
        axes.axvline(1.0, color="#777777", linestyle="--", label="fastest dense cache")
        axes.set_title(f"after {n:,} tokens")
        axes.set_xlabel("time of a decode step, × dense (one thread)")
        axes.set_ylabel("KL, nats")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside lower center")
    made = document["made"]
    figure.suptitle(f"equal bytes: commit {made['commit'] or 'unknown'}, {made['machine']}", fontsize=8)
    return figure


if __name__ == "__main__":
    main()
