"""NOVA-KV's claims on a model's statistics: where to quantize, and with what.

    python benchmarks/nova_claims.py --statistics DIR --model smollm2 --output results/measured

Source: NOVA-KV (arXiv:2608.04074): product quantization after the transform beats it before, at equal bits;
a transform that is not orthogonal fails with a flat scalar quantizer. Distortion is the expected squared logit error of
held-out keys, relative to that of the mean key (evaluation/scores/key_distortion.py). Every way stores 2 bits;
the vector quantizers add a float16 gain, the scalar ones a float16 range, per token and head.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from karhunen.allocation.uniform import Uniform
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.key_distortion import logit_distortion
from karhunen.metrics.query import QueryMetric
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.base import QuantizerSpec
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Side
from karhunen.statistics.artifact import load_statistics
from karhunen.transforms.base import TransformSpec
from karhunen.transforms.identity import Identity
from karhunen.transforms.klt import KLT
from karhunen.transforms.rotations import Hadamard


def ways(n_iterations: int) -> dict[str, tuple[TransformSpec, QuantizerSpec]]:
    """Coordinates and quantizers."""
    stratified, flat = GroupVQ(size=4, n_iterations=n_iterations), Affine(PerToken())
    return {
        "group VQ before": (Identity(), stratified),
        "group VQ after Hadamard": (Hadamard(), stratified),
        "group VQ after": (KLT(), stratified),
        "group VQ after, equal volume": (KLT(), GroupVQ(size=4, grouping="equal_volume", n_iterations=n_iterations)),
        "residual VQ after": (KLT(), GroupVQ(size=4, depth=2, n_iterations=n_iterations)),
        "flat scalar before": (Identity(), flat),
        "flat scalar after Hadamard": (Hadamard(), flat),
        "flat scalar after": (KLT(), flat),
    }


def plot(rows: dict[str, list[float]], layers: list[int], caption: str) -> Figure:
    """Distortion by layer."""
    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    figure.suptitle(caption, fontsize=8, x=0.01, ha="left")
    axes = figure.subplots()
    markers = iter("sPD*X" + "ov^")
    for name, values in rows.items():
        colour = "#D55E00" if "after" in name and "Hadamard" not in name else "#777777"
        line = "--" if "scalar" in name else "-"
        axes.semilogy(layers, values, line, marker=next(markers), color=colour, label=name, alpha=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    axes.set(xlabel="layer", ylabel="squared logit error ÷ that of the mean key", title="2 bits per key coefficient")
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--statistics", type=Path, required=True, help="of the recipe nova_kv:sink=4")
    parser.add_argument("--model", default="smollm2", help="what the model is called in the file's name")
    parser.add_argument("--layers", type=int, nargs="+", help="by default four, evenly spread")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("results/measured"))
    given = parser.parse_args()
    statistics = load_statistics(given.statistics)
    measured = sorted(statistics.layers)
    layers = given.layers or measured[:: max(1, len(measured) // 4)]
    rows: dict[str, list[float]] = {}
    for name, (transform, quantizer) in ways(given.iterations).items():
        side = Side(metric=QueryMetric(), transform=transform, allocation=Uniform(2), quantizer=quantizer)
        rows[name] = [logit_distortion(side, statistics, layer) for layer in layers]
    body = {
        "what": "claims of NOVA-KV on keys after RoPE, 2 bits per coefficient",
        "architecture": statistics.model.architecture,
        "calibration": list(statistics.sources),
        "layers": layers,
        "distortion": rows,
        "median": {name: median(values) for name, values in rows.items()},
        "provenance": asdict(provenance()),
    }
    given.output.mkdir(parents=True, exist_ok=True)
    target = given.output / f"nova_claims-{given.model}"
    target.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    commit = body["provenance"]["commit"] or "unknown"
    caption = f"{given.model}: statistics of {statistics.n_tokens:,} tokens, commit {commit}"
    plot(rows, layers, caption).savefig(target.with_suffix(".png"), dpi=110)
    print(json.dumps(body["median"], indent=1))


if __name__ == "__main__":
    main()
