"""The frame of a page as a picture, drawn from the fields that the code packs and from a page that it made."""

import struct
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from karhunen.evaluation.results.plots import COLOURS
from karhunen.pages import PageCodec
from karhunen.pages.frame import ENTRY, ENTRY_FIELDS, HEADER, HEADER_FIELDS, LENGTH, read

Cell = tuple[str, float, str]  # what is written in it, how wide it is, colour

GREY = "#dddddd"
NARROW, SPACE = 0.055, 0.05  # shares of a row: below it a name has no room; between names below a row
BELOW = -0.55  # where these names begin, in heights of a row


def page_figure(codec: PageCodec, page: bytes) -> Figure:
    """Three rows, each to its own scale: the header, a layer's entry, and all bytes of `page`."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    header, entry, whole = figure.subplots(3, 1)
    _row(header, _fields(HEADER_FIELDS), f"header, to scale: {HEADER.size} bytes, once")
    first = read(page).sections[0].entry
    n_parts = len(first.key) + len(first.value)
    lengths = [("length\n4", float(LENGTH.size), COLOURS[3])] * n_parts
    sizes = f"{ENTRY.size} bytes and {LENGTH.size} for each part, here {n_parts}"
    _row(entry, [*_fields(ENTRY_FIELDS), *lengths], f"entry, to scale: {sizes}; once for each layer")
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
    """Cells side by side, to scale; those too narrow for their names have them below, at the end of a line."""
    total = sum(width for _, width, _ in cells)
    axes.set_xlim(0, total)
    axes.set_ylim(BELOW - 0.9, 1)
    outside: list[tuple[str, float]] = []
    at = 0.0
    for label, width, colour in cells:
        axes.add_patch(Rectangle((at, 0), width, 1, facecolor=colour, edgecolor="white", linewidth=0.5, alpha=0.75))
        middle = at + width / 2
        if width >= NARROW * total:
            axes.text(middle, 0.5, label.replace(" ", "\n", 1), ha="center", va="center", fontsize=7)
        else:
            outside.append((label.replace("\n", " "), middle))
        at += width
    for (label, middle), x in zip(outside, _apart([m / total for _, m in outside]), strict=True):
        axes.plot([middle, x * total, x * total], [0, BELOW * 0.7, BELOW], color="black", linewidth=0.5)
        side = "left" if x < SPACE else "center"
        axes.text(x * total, BELOW - 0.05, label.replace(" ", "\n"), ha=side, va="top", fontsize=7)
    axes.set_title(title, fontsize=9, loc="left")
    axes.axis("off")


def _apart(places: Sequence[float]) -> list[float]:
    """Places from 0 to 1, in order, moved right where `SPACE` between them needs it, then left."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + SPACE) if found else place)
    most = 1 - 0.62 * SPACE  # half of the longest name
    for i in reversed(range(len(found))):
        found[i] = min(found[i], most)
        most = found[i] - SPACE
    return found
