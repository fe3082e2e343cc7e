"""Where bytes are coded in each engine, as a picture: docs/serving.png.

python benchmarks/serving_picture.py
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

ROWS = (
    (
        "vLLM\nKarhunenConnector",
        ("device\nthe engine's paged cache", "copies of finished blocks\nbounded queue", "store\nfolder, Redis, s3://…"),
        ("copy, on the step", "encode, decode: threads beside the steps"),
    ),
    (
        "vLLM + LMCache\nserde karhunen",
        ("device\nthe engine's paged cache", "memory tier\nthe engine's vectors", "second tier\ndisk, network"),
        ("LMCache's own transfer", "serialize, deserialize: LMCache's threads"),
    ),
    (
        "SGLang (not run)\nKarhunenStorage",
        ("device\nthe engine's pool", "HiCache's host pool\nthe engine's vectors", "store\nfolder, Redis, s3://…"),
        ("SGLang's own transfer", "batch_set_v1, batch_get_v1: SGLang's threads"),
    ),
)  # fmt: skip
AT, WIDTH, HEIGHT = (2.3, 6.6, 11.6), 2.9, 0.62
PLAIN, CODED = "#dddddd", "#4c9f70"


def picture() -> Figure:
    figure = Figure(figsize=(12.5, 4.4), layout="constrained")
    axes: Axes = figure.subplots()
    for row, (name, boxes, arrows) in enumerate(ROWS):
        y = -row
        axes.text(0.0, y, name, va="center", fontsize=9, weight="bold")
        for i, (x, label) in enumerate(zip(AT, boxes, strict=True)):
            colour = CODED if i == 2 else PLAIN
            axes.add_patch(Rectangle((x, y - HEIGHT / 2), WIDTH, HEIGHT, facecolor=colour, edgecolor="white"))
            axes.text(x + WIDTH / 2, y, label, ha="center", va="center", fontsize=8)
        for i, label in enumerate(arrows):
            start, stop = AT[i] + WIDTH, AT[i + 1]
            style = {"arrowstyle": "<->", "mutation_scale": 12, "color": CODED if i else "#555555", "linewidth": 1.6}
            axes.add_patch(FancyArrowPatch((start, y), (stop, y), **style))
            words = label.replace(": ", ":\n").replace(", on", ",\non").replace("own ", "own\n")
            axes.text((start + stop) / 2, y + 0.08, words, ha="center", va="bottom", fontsize=7)
    axes.text(AT[0], 0.62, "as the engine keeps it (bfloat16)", fontsize=9, color="#555555")
    axes.text(AT[2], 0.62, "pages: coded, self-describing", fontsize=9, color=CODED, weight="bold")
    axes.set_xlim(0, AT[2] + WIDTH)
    axes.set_ylim(-2.5, 0.85)
    axes.axis("off")
    return figure


def main() -> None:
    target = Path(__file__).parent.parent / "docs" / "serving.png"
    picture().savefig(target, dpi=130)
    print(target)


if __name__ == "__main__":
    main()
