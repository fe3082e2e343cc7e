"""Pictures of `karhunen bench`: speed-up against length, and the roofline; shapes, device, versions, commit in them."""

from typing import Any

from matplotlib.figure import Figure

from karhunen.device import HOST
from karhunen.evaluation.results.plots import COLOURS, MARKERS


def speed_figure(document: dict[str, Any]) -> Figure:
    """Left: how many times faster than the fastest dense attention. Right: bytes read each second, under the copy."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows: list[dict[str, Any]] = document["rows"]
    labels = sorted({_label(row) for row in rows})
    for i, label in enumerate(labels):
        mine = sorted((row for row in rows if _label(row) == label), key=lambda row: row["tokens"])
        tokens = [row["tokens"] for row in mine]
        look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        left.plot(tokens, [row["speed_up"] for row in mine], label=label, **look)
        seconds = [row["milliseconds"]["bytes"] / 1e3 for row in mine]
        rates = [row["bytes_read"] / s / 1e9 for row, s in zip(mine, seconds, strict=True)]
        dense = [row["dense_bytes_read"] / s / 1e9 for row, s in zip(mine, seconds, strict=True)]
        right.plot(tokens, rates, **look)
        right.plot(tokens, dense, linestyle=":", **look)
    left.axhline(1.0, color="#777777", linewidth=0.8)
    for rate in document["copy_gb_per_second"].values():
        right.axhline(rate, color="#777777", linestyle="--")
    for style, meaning in (("-", "bytes read"), (":", "bytes a dense cache would read"), ("--", "a copy in memory")):
        right.plot([], [], color="#777777", linestyle=style, label=meaning)
    left.set_ylabel("times faster than the fastest dense")
    right.set_ylabel("GB/s")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    made = document["provenance"]
    figure.suptitle(
        f"{document['mode']}: torch {made['versions'].get('torch', '?')}, commit "
        f"{made['commit'] or 'unknown'}, {made['machine']}, {document['device']}",
        fontsize=8,
    )
    return figure


def _label(row: dict[str, Any]) -> str:
    where = f"{row['threads']} thread(s)" if row["device"] == HOST.type else row["device"]
    if "shape" not in row:  # a model's bits per element fall with length, as the exact window weighs less
        return f"{row['model']}, {row.get('recipe', '')}, {where}"
    return f"{row['shape']}, batch {row['batch']}, {where}, {row['bits_per_element']:.2f} bits"
