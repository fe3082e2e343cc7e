"""Plot a bit plan: how many bits each layer and head gets, for keys and for values.

    python examples/plot_a_bit_plan.py CODEC [PICTURE]

CODEC is a folder that `karhunen calibrate` or `Codec.save_pretrained` wrote. Needs matplotlib (`karhunen[plots]`).
"""

import sys

from matplotlib.figure import Figure

import karhunen
from karhunen.evaluation.results.composition import anatomy


def main(folder: str, picture: str = "bit_plan.png") -> None:
    codec = karhunen.Codec.from_pretrained(folder)
    figure = Figure(figsize=(8, 4), layout="constrained")
    image = None
    for axes, slot in zip(figure.subplots(1, 2), ("key", "value"), strict=True):
        sides = [side for side in anatomy(codec).sides if side.slot == slot]
        grid = [[group.mean for group in side.bits] for side in sides]  # [layers heads]
        image = axes.imshow(grid, aspect="auto", vmin=0)
        axes.set(title=f"{slot}s", xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(sides)), [side.layer for side in sides])
        print(f"{slot}s: {min(map(min, grid)):.2f} to {max(map(max, grid)):.2f} bits for each number")
    figure.colorbar(image, ax=figure.axes, label="bits, codes only")
    figure.savefig(picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("give a codec's folder")
    main(*sys.argv[1:])
