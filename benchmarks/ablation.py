"""What each ingredient of the recipe `karhunen` is worth: the recipe whole, and without one of them, at equal bytes.

Every variant is a recipe like any other: fitted on the same text, really packed, scored by `karhunen evaluate`'s own
runner on the development documents, one JSON each; what exists is not run again. The last thing printed is the table.

    python benchmarks/ablation.py --json results/measured/ablation.json
    python benchmarks/ablation.py --instead --rate 8 --json results/measured/instead.json

The second measures what was tried in place of an ingredient, or on top of all, and is not in the recipe.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from karhunen.allocation.uniform import Uniform
from karhunen.allocation.water_filling import WaterFilling
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.results.rates import Rated
from karhunen.evaluation.results.result import Result, read_result
from karhunen.evaluation.results.rows import row_of
from karhunen.evaluation.runner import Plan, evaluate
from karhunen.evaluation.tasks.texts import Texts
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.embedded import load
from karhunen.metrics.output import OutputMetric
from karhunen.metrics.plain import Plain
from karhunen.metrics.query import QueryMetric
from karhunen.packing.deflate import Deflate
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.quantizers.lloyd_max import LloydMax
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.transforms.identity import Identity
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: 4.0, 8: 2.0, 12: 4 / 3}
GROUP_SIZE = {4: 2, 8: 4}  # coefficients that share a byte where all bytes hold equally many; 6 does not divide a head


def instead(rate: int) -> dict[str, Recipe]:
    """By what is another way or comes on top."""
    whole = make(f"karhunen:bits={RATES[rate]}")
    sides = partial(both, whole)
    joined = replace(
        whole,
        key=replace(key_of(whole), frame=replace(key_of(whole).frame, joined=True)),
        value=replace(value_of(whole), frame=RopeFrame(joined=True)),
    )
    return {
        "whole": whole,
        "with the heads of a layer joined into one vector": joined,
        "with values of a layer joined into one vector": replace(joined, key=whole.key),
        "with DEFLATE over pages of 256 tokens": sides(lambda s: replace(s, packing=Deflate(256))),
        "with a gain of 8 bits per token and head": sides(lambda s: replace(s, quantizer=ByteVQ(gain="log8"))),
        "with codebooks half trained on Gaussian vectors": sides(
            lambda s: replace(s, quantizer=ByteVQ(gaussian_share=0.5))
        ),
        "with twice the rounds of k-means": sides(lambda s: replace(s, quantizer=ByteVQ(n_iterations=20))),
    }


def without(rate: int) -> dict[str, Recipe]:
    """By what is missing."""
    whole = make(f"karhunen:bits={RATES[rate]}")
    per_head = WaterFilling(RATES[rate], "head")
    sides = partial(both, whole)
    found = {
        "whole": whole,
        "without one budget for the model (each head the same bytes)": sides(lambda s: replace(s, allocation=per_head)),
        "without Fisher metric (queries for keys, W_O for values; each head the same bytes)": replace(
            both(whole, lambda s: replace(s, allocation=per_head)),
            key=replace(key_of(whole), metric=QueryMetric(), allocation=per_head),
            value=replace(value_of(whole), metric=OutputMetric(), allocation=per_head),
        ),
        "without any metric (error of the numbers)": sides(lambda s: replace(s, metric=Plain())),
        "without block frame (keys after RoPE)": replace(whole, key=replace(key_of(whole), frame=RopeFrame())),
        "without mean by offset (one mean)": replace(
            whole, key=replace(key_of(whole), frame=replace(key_of(whole).frame, center=False))
        ),
        "without transform (coordinates as they are)": sides(
            lambda s: replace(s, transform=Identity(), metric=Plain())
        ),
        "without vectors (Lloyd-Max scalars of whole bits)": sides(
            lambda s: replace(s, quantizer=LloydMax(gain="none", scaled=True))
        ),
        "without the loss of byte codes in the budget": sides(lambda s: replace(s, quantizer=ByteVQ(loss=()))),
        "without abnormal tokens kept exact": replace(whole, window=SinkRecent(4, 128)),
    }
    if rate in GROUP_SIZE:
        equal = GroupVQ(GROUP_SIZE[rate], grouping="equal_volume", gain="none")
        bits = Uniform(8 // GROUP_SIZE[rate])
        found["without variable groups (as many coefficients in each byte, equal volumes)"] = sides(
            lambda s: replace(s, allocation=bits, quantizer=equal)
        )
    return found


def both(recipe: Recipe, change: Callable[[Side], Side]) -> Recipe:
    """The recipe with both sides changed alike."""
    return replace(recipe, key=change(key_of(recipe)), value=change(value_of(recipe)))


def key_of(recipe: Recipe) -> Side:
    """Its keys."""
    assert recipe.key is not None, "karhunen codes both"
    return recipe.key


def value_of(recipe: Recipe) -> Side:
    """Its values."""
    assert recipe.value is not None, "karhunen codes both"
    return recipe.value


def main() -> None:
    """Run what is missing, print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["smollm2", "gemma3-270m"])
    parser.add_argument("--rate", type=int, nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--instead", action="store_true", help="what was tried in place of the recipe's own ways")
    parser.add_argument("--only", default="", help="variants whose name holds these letters")
    parser.add_argument("--results", type=Path, default=Path("results/ablation"))
    parser.add_argument("--statistics", type=Path, help="holds a folder MODEL-float32 for each model")
    parser.add_argument("--prefill-tokens", type=int, default=2560)
    parser.add_argument("--scored-tokens", type=int, default=384)
    parser.add_argument("--prose", type=int, default=1)
    parser.add_argument("--code", type=int, default=1)
    parser.add_argument("--literature", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rated = tuple(
        Rated("karhunen", rate, f"{rate}: {name}", recipe)
        for rate in given.rate
        for name, recipe in (instead if given.instead else without)(rate).items()
        if given.only in name or name == "whole"
    )
    sizes = {"prefill_tokens": given.prefill_tokens, "scored_tokens": given.scored_tokens, "generated_tokens": 0}
    counts = {"n_prose": given.prose, "n_code": given.code, "n_literature": given.literature}
    tables: dict[str, list[dict]] = {}
    for model in given.model:
        plan = Plan(
            model_name=model,
            dtype="float32",
            tasks=(Texts(split="development", **counts, **sizes),),
            rated=rated,
            results=given.results,
            statistics=(given.statistics or given.results / "statistics") / f"{model}-float32",
        )
        outcome = evaluate(plan, partial(load, model), on_stage=partial(print, flush=True))
        for name, reason in outcome.refused.items():
            print(f"not measured: {name}: {reason}")
        tables[model] = [row(read_result(path)) for path in outcome.paths]
        print(f"\n{model}\n\n{table(tables[model])}\n", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"made": asdict(provenance()), "rows": tables}, indent=1) + "\n")


def row(result: Result) -> dict:
    """Of the table."""
    _, variant = re.split(": ", result["configuration"]["text"], maxsplit=1)
    return {"variant": variant, **row_of(result).to_dict()}


def table(rows: list[dict]) -> str:
    """Markdown: a line per variant, a column per rate; the costliest ingredients last."""
    rates = sorted({row["rate"] for row in rows})
    whole = {row["rate"]: row["kl"] for row in rows if row["variant"] == "whole"}
    variants = sorted({r["variant"] for r in rows}, key=lambda v: fmean(_times(rows, v, whole)))
    cells = {(r["variant"], r["rate"]): _cell(r, whole) for r in rows}
    lines = ["| variant | " + " | ".join(f"{rate}×" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    lines += [f"| {v} | " + " | ".join(cells.get((v, rate), "") for rate in rates) + " |" for v in variants]
    return "\n".join(lines)


def _times(rows: list[dict], variant: str, whole: dict[int, float]) -> list[float]:
    return [r["kl"] / whole[r["rate"]] for r in rows if r["variant"] == variant]


def _cell(row: dict, whole: dict[int, float]) -> str:
    times = "" if row["variant"] == "whole" else f" **×{row['kl'] / whole[row['rate']]:.2f}**"
    interval = f"({row['kl_low']:.5f}–{row['kl_high']:.5f})"
    return f"{row['kl']:.5f}{times} {interval}, {row['bits_per_element']:.3f} bits, {row['top1']:.3f}"


if __name__ == "__main__":
    main()
