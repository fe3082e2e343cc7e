"""README's figures from what is kept under results/: the picture of ten methods, the table of quality, that of speed.

    python benchmarks/readme_figures.py

writes docs/methods.png and what stands between the markers `karhunen quality` and `karhunen speed` of README.md; run it
after `results/measured/leaderboard.json`, or `layer.json` or `smollm2.json` in `results/measured/speed`, have changed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from karhunen.evaluation.results.plots import OURS, style

ROOT = Path(__file__).parents[1]
MODEL, RATE = "smollm2", 8
INTEGERS = ("int2", "int4", "int8")
METHODS = {
    "karhunen": "karhunen",
    "commvq": "CommVQ",
    "nova_kv": "NOVA-KV",
    "palu": "Palu",
    "spectra": "SPECTRA",
    "kvtc": "KVTC",
    "quarot": "QuaRot",
    "turboquant": "TurboQuant",
    "kivi": "KIVI",
    "int2": "plain integers",
}
"""Ten: ours, the two papers it builds on, and the nearest of each other kind; the integers share one curve."""
SHAPES = {"3x3x64": "3 × 3 heads of 64", "8x4x128": "8 × 4 heads of 128", "8x1x128": "8 × 1 heads of 128"}
LENGTHS = (4096, 65536)
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaderboard", type=Path, default=ROOT / "results/measured/leaderboard.json")
    parser.add_argument("--speed", type=Path, default=ROOT / "results/measured/speed", help="layer.json, smollm2.json")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/methods.png")
    options = parser.parse_args()
    rows = of_model(json.loads(options.leaderboard.read_text("utf-8")))
    picture(rows).savefig(options.picture, dpi=150, metadata={"Software": None})
    text = options.readme.read_text("utf-8")
    text = between(text, "quality", quality_table(rows))
    layer, step = (json.loads((options.speed / f"{name}.json").read_text("utf-8")) for name in ("layer", MODEL))
    text = between(text, "speed", speed_table(layer, step))
    options.readme.write_text(text, "utf-8")


def of_model(rows: Rows) -> Rows:
    """Rows of the model that README shows; ValueError if they were measured on different documents."""
    mine = [row for row in rows if row["model"] == MODEL]
    if len(shown := {(row["task"], row.get("inputs")) for row in mine}) > 1:
        raise ValueError(f"rows of {MODEL} are of different documents, {sorted(map(str, shown))}; show one set")
    return mine


def between(text: str, name: str, table: str) -> str:
    """The text with the table between two markers; ValueError if it lacks them."""
    begin, end = (f"<!-- karhunen {name}: {word} -->" for word in ("begin", "end"))
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the file lacks the markers {begin} and {end}")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def curve(rows: Rows, recipe: str) -> Rows:
    """Results of a method that make the cache smaller, largest cache first."""
    names = INTEGERS if recipe in INTEGERS else (recipe,)
    found = [row for row in rows if row["recipe"] in names and row["kl"] and row["ratio_to_16_bits"] > 1]
    return sorted(found, key=lambda row: row["ratio_to_16_bits"])


def at_rate(rows: Rows) -> Rows:
    """One row for each method at about 8 times, lowest KL first."""
    found = {row["recipe"]: row for row in rows if row["rate"] == RATE and row["recipe"] in METHODS}
    return sorted(found.values(), key=lambda row: row["kl"])


def picture(rows: Rows) -> Figure:
    """KL against how many times smaller the cache is; ours in front, each curve named in the legend."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for recipe, name in METHODS.items():
        mine, ours = curve(rows, recipe), recipe == OURS
        look = style(recipe)
        axes.plot(
            [row["ratio_to_16_bits"] for row in mine],
            [row["kl"] for row in mine],
            label=name,
            lw=3 if ours else 1.2,
            markersize=13 if ours else 5,
            alpha=1 if ours else 0.75,
            **look,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2, 4, 8, 12, 16], ["2×", "4×", "8×", "12×", "16×"])
    axes.minorticks_off()
    axes.set_xlabel("times smaller than a 16-bit cache")
    axes.set_ylabel("KL to the uncompressed model, nats")
    axes.set_title("What compressing the cache costs SmolLM2-135M (lower is better)", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def quality_table(rows: Rows) -> str:
    """Markdown: the ten methods at about 8 times."""
    lines = [
        "| method | bits per element | times smaller | KL, nats | same next token | commit |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for row in at_rate(rows):
        name = METHODS[row["recipe"]] if row["recipe"] not in INTEGERS else "2-bit integers"
        cells = (
            f"**`{name}`**" if row["recipe"] == OURS else name,
            f"{row['bits_per_element']:.2f}",
            f"{row['ratio_to_16_bits']:.1f}",
            f"{row['kl']:.4f}",
            f"{row['top1']:.1%}",
            f"`{row['commit']}`",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed_table(layer: dict[str, Any], step: dict[str, Any]) -> str:
    """Markdown: one layer's decode step on one thread, and how many times as fast as what attends to dense numbers;
    below it a whole model's longest one in a sentence."""
    rows = {(row["shape"], row["tokens"]): row for row in layer["rows"] if row["threads"] == 1 and row["batch"] == 1}
    head = "| KV heads × query heads of each | tokens | from bytes, ms | SDPA float32 | SDPA bfloat16 | fastest dense |"
    lines = [head, "|---|--:|--:|--:|--:|--:|"]
    for (shape, tokens), row in rows.items():
        if shape in SHAPES and tokens in LENGTHS:
            ratios = [f"{row[f'speed_up{which}']:.1f}×" for which in ("_sdpa", "_bfloat16", "")]
            cells = (SHAPES[shape], f"{tokens:,}", f"{row['milliseconds']['bytes']:.1f}", *ratios)
            lines.append("| " + " | ".join(cells) + " |")
    longest = max((row for row in step["rows"] if row["threads"] == 1), key=lambda row: row["tokens"])
    took = {name: f"{value:.0f} ms" for name, value in longest["milliseconds"].items()}
    commits = " and ".join(dict.fromkeys(document["provenance"]["commit"] for document in (layer, step)))
    length, machine = f"{longest['tokens']:,}", layer["provenance"]["machine"]
    return "\n".join([
        *lines,
        "",
        f"A whole step of SmolLM2 at {length} tokens takes {took['bytes']}, with transformers' dynamic cache",
        f"{took['dynamic']}, with its static cache {took['static']}; {machine}, commit {commits}.",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
