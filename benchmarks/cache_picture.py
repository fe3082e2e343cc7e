"""README's first picture: bytes of a KV cache against the length of the text, uncompressed and compressed.

    python benchmarks/cache_picture.py          # writes docs/cache.png

All of it is the arithmetic of `karhunen plan`: no model runs. The compressed cache counts its exact tokens and tables.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from karhunen.planning import table
from karhunen.planning.price import price
from karhunen.planning.rate import Rate
from karhunen.planning.shape import ModelShape
from karhunen.recipes import make

FILE = Path(__file__).parents[1] / "docs" / "cache.png"
MODEL, NAME, RECIPE = "llama-3.1-8b", "Llama 3.1 8B", "karhunen:bits=2"
LONGEST = 131072
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, default=FILE)
    options = parser.parse_args()
    shape = table.find(MODEL)
    assert shape is not None, f"the table of models has {MODEL}"
    picture(shape, price(RECIPE, make(RECIPE), shape)).savefig(options.picture, dpi=150, metadata={"Software": None})


def gigabytes(shape: ModelShape, rate: Rate | None, n_tokens: int) -> float:
    """One conversation's cache, in 10⁹ bytes; `None` is the uncompressed one."""
    held = shape.dense_bytes(n_tokens) if rate is None else rate.held_bytes(shape, n_tokens) + rate.table_bytes(shape)
    return held / 1e9


def picture(shape: ModelShape, rate: Rate) -> Figure:
    """Two lines, and the weights for comparison."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    tokens = [1024 * i for i in range(1, LONGEST // 1024 + 1)]
    lines = ((None, "uncompressed, 16 bits a number", GREY), (rate, "compressed, 2 bits a number", ORANGE))
    for which, words, colour in lines:
        y = [gigabytes(shape, which, n) for n in tokens]
        axes.plot(tokens, y, color=colour, lw=2.5, ls="-" if which else "--")
        axes.text(tokens[-1] * 1.01, y[-1], f"{y[-1]:.1f} GB\n{words}", va="center", color=colour, fontsize=9)
    if shape.weights is not None:
        weights = shape.weights.held_bytes() / 1e9
        axes.axhline(weights, color=BLUE, lw=1, ls=":")
        axes.text(2000, weights, f"the model's weights: {weights:.1f} GB", va="bottom", color=BLUE, fontsize=9)
    ticks = [n * 1024 for n in (8, 32, 64, 96, 128)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set(xlim=(0, LONGEST), ylim=(0, None))
    axes.set_xlabel("tokens of one conversation")
    axes.set_ylabel("KV cache, GB")
    axes.set_title(f"What {NAME} keeps of a text", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
