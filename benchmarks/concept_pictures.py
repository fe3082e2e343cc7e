"""The drawings of docs/concepts.md, from the statistics of a real layer.

    python benchmarks/concept_pictures.py --statistics FOLDER          # writes docs/pictures/*.svg

FOLDER is what `karhunen calibrate --keep-statistics` leaves in OUTPUT/statistics, of the recipes `karhunen` and
`nova_kv`: keys in both frames, gradients, samples. One head of one layer is drawn.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from karhunen.allocation.water_filling import ideal_bits
from karhunen.evaluation.results.report import NO_DATE
from karhunen.fitting import fit, samples_and_variances
from karhunen.frames.rope_frame import RopeFrame
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.samples import Samples
from karhunen.windows.partition import Place
from karhunen.windows.sink_recent import SinkRecent

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
STYLE: dict[Any, Any] = {"svg.hashsalt": "karhunen", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False}  # fmt: skip
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
DOTS = 1500
OURS = make("karhunen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--statistics", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=12)
    parser.add_argument("--head", type=int, default=1)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    statistics = one_layer(load_statistics(options.statistics), options.layer)
    pictures: dict[str, Callable[[], Figure]] = {
        "frame": lambda: frame(statistics.layers[0], options.head),
        "metric": lambda: metric(statistics.layers[0], options.head),
        "transform": lambda: transform(statistics, options.head),
        "water_line": lambda: water_line(statistics, options.head),
        "byte_code": lambda: byte_code(statistics),
        "window": window,
    }
    with rc_context(STYLE):
        for name, draw in pictures.items():
            draw().savefig(options.output / f"{name}.svg", metadata=NO_DATE)


def one_layer(statistics: Statistics, layer: int) -> Statistics:
    """Statistics of one layer, as if the model had no other; ValueError if it was not measured."""
    if layer not in statistics.layers:
        raise ValueError(f"layer {layer} was not measured; these were: {', '.join(map(str, statistics.layers))}")
    model = replace(statistics.model, layers=(statistics.model.layers[layer],))
    return replace(statistics, model=model, layers={0: statistics.layers[layer]})


def key_samples(layer: LayerStatistics) -> Samples:
    """Keys as the model caches them, after RoPE; ValueError if there are none."""
    for need, found in layer.measured.items():
        if need.kind == "samples" and need.slot == "key" and need.block_tokens is None and isinstance(found, Samples):
            return found
    raise ValueError("these statistics hold no samples of keys after RoPE; calibrate `nova_kv` on the same text")


def frame(layer: LayerStatistics, head: int) -> Figure:
    """One pair of coordinates of many keys, which RoPE turns by their position, in three frames."""
    rotary, samples = layer.key_rotary, key_samples(layer)
    if rotary is None:
        raise ValueError("this layer's keys are not rotated; choose another --layer")
    keys, positions = samples.vectors[:, :DOTS][None].double(), samples.positions[None, :DOTS]
    unrotated = RopeFrame(1).forward(keys, positions, rotary)[0, head]
    n_pairs = len(rotary.inv_freq)
    turn = rotary.inv_freq * 64  # radians within a block of 64 tokens
    shown = [i for i in range(n_pairs) if 0.4 < float(turn[i]) < 1.6]
    lengths = torch.stack([unrotated[:, [i, i + n_pairs]].mean(0).norm() for i in shown])
    i = shown[int(lengths.argmax())]
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    panels = ((1, "before RoPE:\nkeys stand still"), (64, "relative to their block of 64 tokens:\na short arc"),
              (None, "after RoPE, as cached:\nturned by the position"))  # fmt: skip
    most = float(unrotated[:, [i, i + n_pairs]].norm(dim=-1).quantile(0.995)) * 1.1
    for axes, (block, title) in zip(figure.subplots(1, 3), panels, strict=True):
        seen = RopeFrame(block).forward(keys, positions, rotary)[0, head][:, [i, i + n_pairs]]
        dots = axes.scatter(*seen.T.numpy(), c=positions[0] % 64, s=4, cmap="viridis", alpha=0.7)
        axes.set(xlim=(-most, most), ylim=(-most, most), xticks=[], yticks=[], aspect="equal")
        axes.set_title(title, fontsize=9)
        axes.plot(0, 0, "+", color="black")
    figure.colorbar(dots, ax=figure.axes, label="place in its block", shrink=0.8)
    return figure


def metric(layer: LayerStatistics, head: int) -> Figure:
    """How much keys vary along each of their principal axes, and what an error there costs the predictions."""
    about = OURS.about("key")
    need = next(iter(OURS.key.metric.needs(about))) if OURS.key else about
    cost = layer.get(OURS.seen_by_window(need), Moments).second_moment[head]
    covariance = layer.get(about, Moments).covariance[head]
    variance, axes_of = torch.linalg.eigh(covariance)
    variance, axes_of = variance.flip(-1), axes_of.flip(-1)
    along = torch.einsum("ij,ik,kj->j", axes_of, cost, axes_of)
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(len(variance))
    for axes, heights, colour, words in (
        (left, variance, BLUE, "how much keys vary along an axis"),
        (right, along, ORANGE, "what an error of size 1 along it costs, nats"),
    ):
        axes.bar(places, heights.numpy(), color=colour, width=1)
        axes.set_yscale("log")
        axes.set_xlabel("axes of the keys, strongest first")
        axes.set_title(words, loc="left", fontsize=9)
    return figure


def transform(statistics: Statistics, head: int) -> Figure:
    """Correlation of a key's coordinates before and after the transform."""
    after, _ = samples_and_variances(OURS, statistics, 0, "key")
    before = statistics.layers[0].get(replace(OURS.about("key"), kind="samples"), Samples).vectors
    figure = Figure(figsize=(7.5, 3.3), layout="constrained")
    image: Any = None
    for axes, vectors, words in zip(
        figure.subplots(1, 2), (before, after), ("a head's coordinates", "after the transform"), strict=True
    ):
        image = axes.imshow(torch.corrcoef(vectors[head].T).abs().numpy(), vmin=0, vmax=1, cmap="magma")
        axes.set(xticks=[], yticks=[])
        axes.set_title(words, fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="|correlation|", shrink=0.8)
    return figure


def water_line(statistics: Statistics, head: int, bits: float = 1.0) -> Figure:
    """Variances of a head's coefficients, and the line above which they get bits."""
    _, variances = samples_and_variances(OURS, statistics, 0, "key")
    spectrum = variances[head].double().sort(descending=True).values
    ones = torch.ones_like(spectrum)
    rates = ideal_bits(spectrum, ones, 0 * ones, 24 * ones, bits * len(spectrum))
    line = float((spectrum * 2 ** (-2 * rates))[rates > 0].mean())
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    places, bottom = range(len(spectrum)), float(spectrum.min()) / 3
    left.bar(places, (spectrum - bottom).numpy(), bottom=bottom, width=1, color=BLUE)
    left.bar(places, (spectrum.clamp(max=line) - bottom).numpy(), bottom=bottom, width=1, color=GREY)
    left.axhline(line, color=ORANGE, lw=1.5)
    left.set_yscale("log")
    words = "the water line: what error is left"
    left.text(len(spectrum) - 1, line * 1.6, words, ha="right", color=ORANGE, bbox={"fc": "white", "ec": "none"})
    left.set_title("variance of each coefficient, weighted by its cost (nats)", loc="left", fontsize=9)
    right.bar(places, rates.numpy(), width=1, color=BLUE)
    right.set_title(f"bits of each, {bits:g} on the mean", loc="left",
                    fontsize=9)  # fmt: skip
    for axes in (left, right):
        axes.set_xlabel("coefficients, strongest first")
    return figure


def byte_code(statistics: Statistics) -> Figure:
    """A byte that covers two coefficients: samples of both, and the 256 pairs of numbers that it can name."""
    samples, _ = samples_and_variances(OURS, statistics, 0, "key")
    quantizer = fit(OURS, statistics).layers[0].key.quantizer
    if not isinstance(quantizer, ByteQuantizer):
        raise TypeError(f"the recipe karhunen has a {type(quantizer).__name__}; a ByteQuantizer is drawn")
    plane = next(j for j, n in enumerate(quantizer.plane_size.tolist()) if n == 2)
    start = int(quantizer.plane_size[:plane].sum())
    entries: Tensor = quantizer.low[:, start : start + 2] * quantizer.scale[start : start + 2]
    coordinates = quantizer.coordinates[start : start + 2]
    seen = samples[int(quantizer.plane_group[plane])][:6000, coordinates]
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*seen.T.numpy(), ",", color=BLUE, alpha=0.6)
    axes.plot(*entries.T.numpy(), ".", color=ORANGE, markersize=4)
    axes.set_xlabel(f"coefficient {int(coordinates[0])}")
    axes.set_ylabel(f"coefficient {int(coordinates[1])}")
    axes.set_title("blue: keys of the calibration text; orange:\nthe 256 points that the byte can name", fontsize=9)
    return figure


def window(n_tokens: int = 400) -> Figure:
    """Which tokens are exact and which are coded, as a text grows."""
    rule = SinkRecent(4, 128)
    figure = Figure(figsize=(9, 1.9), layout="constrained")
    axes = figure.subplots()
    for row, n in enumerate((100, 200, n_tokens)):
        places = rule.partition(n, 1)
        for place, start, stop in places.runs:
            axes.barh(-row, stop - start, left=start, height=0.7, color=ORANGE if place is Place.EXACT else BLUE)
        axes.text(n + 4, -row, f"{n} tokens: {places.count(Place.CODED)} coded", va="center", fontsize=9)
    axes.set(yticks=[], xlim=(0, n_tokens + 110))
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("token of the text; orange is exact (the first 4, the newest 128 to 143), blue is coded")
    return figure


if __name__ == "__main__":
    main()
