"""A dashboard of what caches hold, drawn anew while something runs; lines now and then where nothing can be redrawn."""

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, final

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from karhunen.cli.screen import PLAIN_INTERVAL_SECONDS, Screen, rounded, shown_text

if TYPE_CHECKING:
    from karhunen.hf.cache import CompressedCache
    from karhunen.monitoring.seen import Seen
    from karhunen.store.report import Report

REDRAWN_SECONDS = 0.25
TEXT_LINES = 6
BLOCKS = "▁▂▃▄▅▆▇█"
LABEL_COLUMNS = 18
KINDS = {"codes": "  codes", "side": "  scales, gains", "exact": "  exact tokens"}


@final
class Dashboard:
    """Of one generation: its cache is looked at while text comes. Off unless somebody asks for it."""

    def __init__(self, screen: Screen) -> None:
        from karhunen.monitoring.meter import Meter

        self.screen, self.meter = screen, Meter()
        self.cache: CompressedCache | None = None
        self.live: Live | None = None
        self.said = ""
        self.drawn = -inf  # the first words draw at once

    @contextmanager
    def running(self) -> Iterator[None]:
        """For the duration of the work."""
        console = self.screen.err
        if not redraws(self.screen):
            yield
            return
        with Live(console=console, transient=True, auto_refresh=False) as live:
            self.live = live
            yield
        self.live = None

    def watch(self, cache: "CompressedCache") -> None:
        """This is the one."""
        self.cache = cache
        self.meter.watch(cache)

    def text(self, piece: str) -> None:
        """More of the answer; draws if the last picture is old enough."""
        self.said += piece
        wait = PLAIN_INTERVAL_SECONDS if self.live is None else REDRAWN_SECONDS
        if self.cache is None or time.monotonic() - self.drawn < wait:
            return
        self.drawn = time.monotonic()
        seen = self.seen(self.cache.report())
        if self.live is None:
            self.screen.log(line_of(seen))
        else:
            self.live.update(picture(seen, self.screen.err.width, self.said), refresh=True)

    def seen(self, report: "Report") -> "Seen":
        """What a picture shows."""
        from karhunen.monitoring.seen import seen_in

        return seen_in(report, self.meter)

    def summary(self, report: "Report") -> dict[str, Any]:
        """JSON: what the meter counted."""
        return as_document(self.seen(report))


def redraws(screen: Screen) -> bool:
    """Whether stderr is a terminal that can go back."""
    return screen.err.is_terminal and not screen.err.is_dumb_terminal


def picture(seen: "Seen", width: int, said: str = "") -> Panel:
    """All of it, in a frame no wider than the terminal."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in _rows(seen, max(8, width - LABEL_COLUMNS - 8)):
        rows.add_row(name, value)
    parts: list[Any] = [rows]
    if said:
        parts += [Text(""), Text(_last_lines(shown_text(said), width - 4), style="dim")]
    return Panel(Group(*parts), title="karhunen watch", title_align="left", width=min(width, 100))


def line_of(seen: "Seen") -> str:
    """The same in one line, for logs."""
    said = [
        f"{seen.n_tokens:,.0f} tokens",
        f"{seen.n_coded:,.0f} coded",
        f"{_bytes(seen.dense)} became {_bytes(seen.held)} ({seen.ratio:.2f}x)",
    ]
    if seen.moved:
        said.append(f"accuracy delta {max(seen.moved.values()):.3f} at most")
    if seen.drift is not None:
        said.append(f"drift {seen.drift:.2f}")
    return ", ".join(said)


def as_document(seen: "Seen") -> dict[str, Any]:
    """JSON."""
    return rounded(
        {
            "dense_bytes": seen.dense,
            "held_bytes": seen.held,
            "bytes": dict(seen.by_kind),
            "ratio": seen.ratio,
            "tokens": seen.n_tokens,
            "coded_tokens": seen.n_coded,
            "encoded_tokens": seen.n_encoded,
            "encode_seconds": seen.encode_seconds,
            "bits_by_layer": {str(layer): bits for layer, bits in seen.bits.items()},
            "attention_accuracy_delta": {str(layer): delta for layer, delta in seen.moved.items()},
            "drift": seen.drift,
        }
    )


def blocks(values: list[float], most: float, columns: int) -> str:
    """One block a value, as high as its share of `most`; neighbours join where there are more than columns."""
    n = min(columns, len(values))
    joined = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    means = [sum(part) / len(part) for part in joined]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(len(BLOCKS) * mean / most))] for mean in means)


def _rows(seen: "Seen", columns: int) -> Iterator[tuple[str, str]]:
    yield "uncompressed", _bytes(seen.dense)
    yield "held", f"{_bytes(seen.held)}, {seen.ratio:.2f} times smaller"
    yield from ((words, _bytes(seen.by_kind[kind])) for kind, words in KINDS.items() if kind in seen.by_kind)
    yield "tokens", f"{seen.n_tokens:,.0f}, {seen.n_coded:,.0f} of them coded"
    if seen.bits:
        bits = [seen.bits[layer] for layer in sorted(seen.bits)]
        yield "bits by layer", f"{min(bits):.2f} to {max(bits):.2f}"
        yield "", blocks(bits, max(bits), columns)
    if seen.n_encoded is not None and seen.encode_seconds is not None:
        each = 1e3 * seen.encode_seconds / seen.n_encoded if seen.n_encoded else 0.0
        yield "coding", f"{seen.n_encoded:,.0f} tokens in {seen.encode_seconds:.2f} s, {each:.2f} ms each"
    if seen.moved:
        yield "accuracy delta", ", ".join(f"layer {layer} {delta:.3f}" for layer, delta in seen.moved.items())
    if seen.drift is not None:
        yield "drift", f"{seen.drift:.2f}"


def _last_lines(text: str, columns: int) -> str:
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, columns) or [""]]
    return "\n".join(lines[-TEXT_LINES:])


def _bytes(n: float) -> str:
    for name, unit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= unit:
            return f"{n / unit:.2f} {name}"
    return f"{n:.0f} bytes"
