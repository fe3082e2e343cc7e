"""The papers' observations, reproduced or refuted on a model: decorrelation, energy, water-filling, fewer dimensions.

    python benchmarks/observations.py --model smollm2 --statistics DIR [DIR ...] --output results/measured

SPECTRA (arXiv:2608.07915) observes: channels correlate by 0.2 on average, latents by 0; a quarter of a latent holds
96 % of the energy; water-filled widths cut the error of attention 1.6 times at 1 bit (median of layers); at one
ratio, 3 to 4 bits on fewer dimensions beat 2 bits on all; weights factored in the metric of what they read rebuild keys
13 times better at half rank than the weights alone. The first two and the last are read off statistics; the others code
a document's keys and values and read them with its own queries.
"""

import argparse
import json
import math
import operator
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from karhunen.allocation.base import Allocation
from karhunen.allocation.leading import Leading
from karhunen.allocation.uniform import Uniform
from karhunen.allocation.water_filling import WaterFilling
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.texts import calibration_text, evaluation_text
from karhunen.evaluation.results.composition import anatomy
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.attention_error import attention_errors, capture
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.input_maps import linear_map
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS, Need, Slot
from karhunen.transforms.klt import KLT, principal_axes
from karhunen.transforms.spectra_latent import activations_need, reconstruction_error
from karhunen.windows.sink_recent import SinkRecent

WINDOW = SinkRecent(4, 0)
INPUTS = activations_need(Need("moments", "key", skip_tokens=WINDOW.sink))


def allocations(n_coefficients: int, group: int) -> dict[str, Allocation]:
    """Rivals at one rate, ranges included: fewer dimensions are rounded down to whole groups, so they spend no more."""
    ranges = 32 / group  # bits per coefficient kept: a float16 low end and step

    def fewer(width: int) -> Leading:
        n_groups = math.floor((2 + ranges) / (width + ranges) * n_coefficients / group)
        return Leading(width, n_groups * group / n_coefficients)

    return {
        "1 bit, uniform": Uniform(1),
        "1 bit, water-filled": WaterFilling(1 + ranges, "layer"),
        "2 bits on all": Uniform(2),
        "3 bits on fewer": fewer(3),
        "4 bits on fewer": fewer(4),
        "2 bits, water-filled": WaterFilling(2 + ranges, "layer"),
    }


def off_diagonal(spread: Tensor) -> float:
    """Mean |correlation| of two different coordinates."""
    sigma = spread.diagonal().clamp_min(1e-30).sqrt()
    correlation = (spread / sigma[:, None] / sigma).abs()
    d = len(sigma)
    return float((correlation.sum() - correlation.trace()) / (d * (d - 1)))


def share_of_quarter(energies: Tensor) -> float:
    """Energy of the strongest quarter of the coordinates."""
    ordered = energies.sort(descending=True).values
    return float(ordered[: len(ordered) // 4].sum() / ordered.sum())


def of_layer(statistics: Statistics, layer: int, slot: Slot) -> dict[str, float]:
    """Correlation and energy of one side: channels as cached before RoPE, all heads, and their latent."""
    about = Need("moments", slot, 1 if slot == "key" else None, joined=True, skip_tokens=WINDOW.sink)
    moments = statistics.layers[layer].get(about, Moments)
    second, covariance = moments.second_moment[0], moments.covariance[0]
    axes = principal_axes(second[None])[0]
    centered = principal_axes(covariance[None])[0]
    return {
        "correlation_channels": off_diagonal(covariance),
        "correlation_latent": off_diagonal(axes.mT @ second @ axes),
        "correlation_centered_latent": off_diagonal(centered.mT @ covariance @ centered),
        "energy_of_a_quarter_channels": share_of_quarter(second.diagonal()),
        "energy_of_a_quarter_latent": share_of_quarter((axes * (second @ axes)).sum(0)),
        "energy_of_a_quarter_centered_latent": share_of_quarter((centered * (covariance @ centered)).sum(0)),
    }


def half_rank(model: Any, inputs: Statistics, layer: int, slot: Slot) -> dict[str, float]:
    """What factoring the weights in the metric of what they read is worth, before any norm of the keys."""
    projection = linear_map(model.get_submodule(f"model.layers.{layer}.self_attn"), slot)
    assert projection is not None, "models of this benchmark have plain projections"
    activations = inputs.layers[layer].get(INPUTS, Moments)
    half = len(projection.bias) // 2
    alone, weighted = (reconstruction_error(activations, projection, half, w) for w in (False, True))
    return {
        "half_rank_error_weights_alone": alone,
        "half_rank_error_weighted": weighted,
        "half_rank_factor": alone / weighted,
    }


def coded_errors(
    model: Any, tokens: Tensor, statistics: Statistics, group: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Relative squared error of attention's output by layer, keys and values in the latent at each allocation; and the
    bits per element that were stored."""
    captured = capture(model, tokens)
    shape = statistics.shape(min(statistics.layers))
    errors, stored = dict[str, list[float]](), dict[str, float]()
    for name, allocation in allocations(shape.n_kv_heads * shape.key_dim, group).items():
        side = Side(
            frame=RopeFrame(joined=True),
            transform=KLT(center=False),
            allocation=allocation,
            quantizer=Affine(PerToken(group)),
        )
        codec = fit(Recipe(name, replace(side, frame=RopeFrame(1, joined=True)), side, WINDOW), statistics)
        errors[name] = [error.output_error for error in attention_errors(codec, captured)]
        stored[name] = anatomy(codec).bits_per_element
    return errors, stored


def summary(layers: dict[str, list[dict[str, float]]], errors: dict[str, list[float]]) -> dict[str, Any]:
    """One line an observation: what the paper says, what is found here (medians over layers)."""

    def mid(slot: str, name: str) -> float | None:
        values = [layer[name] for layer in layers[slot] if name in layer]
        return median(values) if values else None

    def gain(worse: str, better: str) -> float:
        return median(a / b for a, b in zip(errors[worse], errors[better], strict=True))

    both = ("key", "value")
    return {
        "channels correlate": {"paper": 0.2, **{slot: mid(slot, "correlation_channels") for slot in both}},
        "latents do not": {"paper": 0.0, **{slot: mid(slot, "correlation_latent") for slot in both}},
        "energy of a quarter of the latent": {
            "paper": 0.96,
            **{slot: mid(slot, "energy_of_a_quarter_latent") for slot in both},
        },
        "water-filling at 1 bit, gain in squared output error": {
            "paper": 1.6,
            "here": gain("1 bit, uniform", "1 bit, water-filled"),
            "as a norm": gain("1 bit, uniform", "1 bit, water-filled") ** 0.5,
        },
        "fewer dimensions at the rate of 2 bits on all, gain in squared output error": {
            "paper": "3 to 4 bits on fewer dimensions win",
            **{name: gain("2 bits on all", name) for name in list(errors)[3:]},
        },
        "weights factored in the metric of what they read, at half rank": {
            "paper": 13.0,
            **{slot: mid(slot, "half_rank_factor") for slot in both},
        },
    }


def plots(
    indices: list[int], layers: dict[str, list[dict[str, float]]], errors: dict[str, list[float]], caption: str
) -> Figure:
    """Correlation, energy and output error by layer."""
    figure = Figure(figsize=(14, 5), layout="constrained")
    figure.suptitle(caption, fontsize=8, x=0.01, ha="left")
    correlation, energy, error = figure.subplots(1, 3)
    for slot, style in (("key", "-"), ("value", "--")):
        for name, colour in (("channels", "#777777"), ("latent", "#D55E00")):
            correlation.plot(indices, [x[f"correlation_{name}"] for x in layers[slot]], style, color=colour)
            energy.plot(indices, [x[f"energy_of_a_quarter_{name}"] for x in layers[slot]], style, color=colour)
            correlation.plot([], [], style, color=colour, label=f"{slot}s, {name}")
    correlation.axhline(0.2, color="#0072B2", linewidth=0.8, label="channels in the paper")
    energy.axhline(0.96, color="#0072B2", linewidth=0.8, label="latent in the paper")
    for (name, values), marker in zip(errors.items(), "os^Dvx", strict=True):
        error.semilogy(indices, values, marker=marker, markersize=3, label=name)
    correlation.set(xlabel="layer", ylabel="mean |correlation|", title="off the diagonal")
    energy.set(xlabel="layer", ylabel="share of the energy", title="strongest quarter", ylim=(0, 1))
    error.set(xlabel="layer", ylabel="squared error ÷ energy", title="attention's output")
    for axes in (correlation, energy, error):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--statistics",
        type=Path,
        nargs="+",
        required=True,
        help="of the recipe spectra",
    )
    parser.add_argument("--tokens", type=int, default=1024, help="length of the document that is coded")
    parser.add_argument("--group", type=int, default=24, help="coefficients that share a range")
    parser.add_argument("--output", type=Path, default=Path("results/measured"))
    given = parser.parse_args()

    from karhunen.hf.embedded import load

    statistics = reduce(operator.add, (load_statistics(folder) for folder in given.statistics))
    indices = sorted(statistics.layers)
    layers = {slot: [of_layer(statistics, i, slot) for i in indices] for slot in SLOTS}
    model, tokenizer = load(given.model)
    inputs = calibrate(model, calibration_text(), [INPUTS], tokenizer)
    for slot in SLOTS:
        layers[slot] = [
            found | half_rank(model, inputs, i, slot) for i, found in zip(indices, layers[slot], strict=True)
        ]
    tokens = tokenizer(evaluation_text()[: 8 * given.tokens], return_tensors="pt")["input_ids"][0, : given.tokens]
    errors, stored = coded_errors(model, tokens, statistics, given.group)
    body = {
        "what": "observations of SPECTRA",
        "model": given.model,
        "calibration": list(statistics.sources),
        "scored_tokens": len(tokens),
        "group": given.group,
        "bits_per_element": stored,
        "summary": summary(layers, errors),
        "layers": layers,
        "output_error": errors,
        "recipe_fingerprint": make("spectra").fingerprint(),
        "provenance": asdict(provenance()),
    }
    given.output.mkdir(parents=True, exist_ok=True)
    target = given.output / f"observations-{given.model}"
    target.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    caption = (
        f"{given.model}: statistics of {statistics.n_tokens:,} tokens, {len(tokens):,} tokens coded, groups of "
        f"{given.group}, commit {body['provenance']['commit'] or 'unknown'}"
    )
    plots(indices, layers, errors, caption).savefig(target.with_suffix(".png"), dpi=110)
    print(json.dumps(body["summary"], indent=1))


if __name__ == "__main__":
    main()
