"""Where each recipe spends its bits: a picture for each recipe's page, from the statistics of a real layer.

    python -m benchmarks.recipe_pictures --statistics FOLDER          # writes docs/pictures/bits/NAME.svg

FOLDER is the one that `karhunen leaderboard` keeps, or any that holds what the recipes need. For a recipe whose
statistics it lacks, `--model NAME` calibrates that layer on 2,048 tokens; without it the recipe is named and left out.
Above: bits of each coefficient of one layer, keys and values, at default options. Below: which tokens of 2,048 are
exact, coded and dropped.
"""

import argparse
import math
from pathlib import Path

import torch
from benchmarks.concept_pictures import BLUE, GREY, ORANGE, STYLE, one_layer
from matplotlib import rc_context
from matplotlib.figure import Figure

import karhunen
from karhunen import recipes
from karhunen.calibration.texts import calibration_text
from karhunen.codec import SideCodec
from karhunen.evaluation.results.composition import coefficient_bits
from karhunen.evaluation.results.report import NO_DATE
from karhunen.fitting import fit
from karhunen.planning.price import split_of
from karhunen.quantizers.base import Codes
from karhunen.recipe import Recipe
from karhunen.statistics.artifact import load_statistics
from karhunen.statistics.gathered import Statistics

FOLDER = Path(__file__).parents[1] / "docs" / "pictures" / "bits"
N_TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--statistics", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=12, help="of the statistics")
    parser.add_argument("--of", type=int, default=12, help="of the model, to calibrate")
    parser.add_argument("--model", help="calibrate it for recipes whose statistics the folder lacks")
    parser.add_argument("--recipe", action="append", help="only this one; repeatable")
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    statistics = one_layer(load_statistics(options.statistics), options.layer)
    loaded = karhunen.load(options.model) if options.model else None
    with rc_context(STYLE):
        for name in options.recipe or recipes.names():
            recipe, measured = recipes.make(name), statistics
            if missing := recipe.needs() - set(statistics.layers[0].measured):
                if loaded is None:
                    print(f"{name}: no picture, since statistics are missing: {'; '.join(map(str, missing))}")
                    continue
                found = karhunen.calibrate(
                    loaded[0], calibration_text(), recipe.needs(), loaded[1], max_tokens=N_TOKENS, layers=[options.of]
                )
                measured = one_layer(found, options.of)
            picture(recipe, measured).savefig(options.output / f"{name}.svg", metadata=NO_DATE)


def picture(recipe: Recipe, statistics: Statistics) -> Figure:
    """Bits by coefficient where the recipe codes any, and a strip of tokens."""
    codec = fit(recipe, statistics)
    sides = [codec.layers[0].key, codec.layers[0].value] if 0 in codec.layers else []
    shape = statistics.model.layers[0]
    figure = Figure(figsize=(9, 3.1 if sides else 1.2), layout="constrained")
    grid = figure.add_gridspec(2 if sides else 1, 2, height_ratios=(4, 1) if sides else (1,))
    most = 1.0
    for i, (side, words) in enumerate(zip(sides, ("keys", "values"), strict=False)):
        axes = figure.add_subplot(grid[0, i])
        bits = bits_of(side, shape.key_dim if i == 0 else shape.value_dim)
        most = max(most, float(bits.max()))
        for group in bits:
            axes.step(range(len(group)), group.numpy(), where="mid", color=BLUE, lw=1, alpha=0.8)
        heads = f"{len(bits)} heads, a line each" if len(bits) > 1 else "one vector of all heads"
        axes.set_title(f"{words}: {float(bits.mean()):.2f} bits on the mean ({heads})", loc="left", fontsize=9)
        axes.set_xlabel("coefficient")
        axes.set_ylabel("bits, codes only")
    for axes in figure.axes:
        axes.set_ylim(0, most * 1.08)
    strip(figure, grid[-1, :], recipe, sides[0].granule_tokens if sides else 1)
    return figure


def bits_of(side: SideCodec, head_size: int) -> torch.Tensor:
    """Bits of each coefficient, [g c]; an entropy coder comes after them."""
    n_tokens = math.lcm(side.quantizer.granule_tokens, 64)
    x = torch.randn(1, side.n_heads, n_tokens, head_size, generator=torch.Generator().manual_seed(0))
    packed = side.encode(x, torch.arange(n_tokens)[None])
    shape = side.quantizer.decode(Codes(side.layout.unpack(packed.planes), packed.side)).shape
    return coefficient_bits(side.quantizer, shape[1], shape[3])


def strip(figure: Figure, place: object, recipe: Recipe, granule: int) -> None:
    """One bar: of 2,048 tokens, how many are exact, coded and dropped."""
    axes = figure.add_subplot(place)  # pyright: ignore[reportArgumentType]
    exact, coded = split_of(recipe.window, granule)(N_TOKENS)
    left = 0
    for n, colour, words in (
        (coded, BLUE, "coded"),
        (N_TOKENS - exact - coded, GREY, "dropped"),
        (exact, ORANGE, "exact"),
    ):
        if n:
            axes.barh(0, n, left=left, color=colour, height=0.6)
            axes.text(left + n / 2, 0.42, f"{n:,} {words}", ha="center", va="bottom", fontsize=8)
        left += n
    axes.set(yticks=[], xlim=(0, N_TOKENS), ylim=(-0.35, 1.1), xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xlabel(f"of {N_TOKENS:,} tokens", loc="left")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
