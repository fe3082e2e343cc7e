"""The frame of a page as a picture, drawn from the fields that the code packs and from a page that it made."""

import struct
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from karhunen.evaluation.plots import COLOURS
from karhunen.pages import PageCodec
from karhunen.pages.frame import ENTRY_FIELDS, HEADER_FIELDS, LENGTH, read

Cell = tuple[str, float, str]  # what is written in it, how wide it is, colour

GREY = "#dddddd"


def page_figure(codec: PageCodec, page: bytes) -> Figure:
    """Three rows: the header, a layer's entry, and all bytes of `page` to scale."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    header, entry, whole = figure.subplots(3, 1)
    _row(header, _fields(HEADER_FIELDS), f"header: {sum(n for _, n, _ in _fields(HEADER_FIELDS)):.0f} bytes, once")
    lengths = [("length of each part", 4.0 * LENGTH.size, COLOURS[3])]
    _row(entry, [*_fields(ENTRY_FIELDS), *lengths], "entry: 20 bytes and 4 for each part, once for each layer")
    _row(whole, _kinds(codec, page), f"the bytes of one page of {read(page).n_tokens} tokens, to scale: {len(page):,}")
    return figure


def _fields(fields: Sequence[tuple[str, str, str]]) -> list[Cell]:
    cells: list[Cell] = []
    for i, (name, code, _) in enumerate(fields):
        n_bytes = struct.calcsize(f"<{code}")
        label = f"{name}\n{n_bytes}" if name != "nothing" else f"–\n{n_bytes}"
        cells.append((label, float(n_bytes), GREY if name == "nothing" else COLOURS[i % 3]))
    return cells


def _kinds(codec: PageCodec, page: bytes) -> list[Cell]:
    """Bytes by kind."""
    frame = codec.open(page)
    planes = side = exact = dense = 0
    for section in frame.sections:
        exact += len(section.exact)
        for slot in ("key", "value"):
            parts = section.key if slot == "key" else section.value
            layout = codec.plan.layouts.get((section.entry.layer, slot))
            for i, part in enumerate(parts):
                if layout is None:
                    dense += len(part)
                    continue
                n = layout.side_bytes(i, frame.n_tokens)
                heads = layout.heads_of(i)
                vectors = (heads.stop - heads.start) * section.entry.n_exact * layout.dim * codec.dtype.itemsize
                side, exact, planes = side + n, exact + vectors, planes + len(part) - n - vectors
    found = (
        ("header, entries", frame.header_bytes, GREY),
        ("planes (codes)", planes, COLOURS[0]),
        ("scales, gains", side, COLOURS[1]),
        ("exact tokens", exact, COLOURS[2]),
        ("layers without a codec", dense, COLOURS[3]),
    )
    return [(f"{name}\n{n:,}", float(n), colour) for name, n, colour in found if n]


def _row(axes: Axes, cells: Sequence[Cell], title: str) -> None:
    """Cells side by side, as wide as they are long, but wide enough to be read."""
    least = 0.045 * sum(width for _, width, _ in cells)
    at = 0.0
    for label, width, colour in cells:
        shown = max(width, least)
        axes.add_patch(Rectangle((at, 0), shown, 1, facecolor=colour, edgecolor="white", alpha=0.75))
        axes.text(at + shown / 2, 0.5, label.replace(" ", "\n", 1), ha="center", va="center", fontsize=7)
        at += shown
    axes.set_xlim(0, at)
    axes.set_ylim(0, 1)
    axes.set_title(title, fontsize=9, loc="left")
    axes.axis("off")
