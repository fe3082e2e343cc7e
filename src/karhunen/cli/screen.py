"""What is shown and where: results on stdout, progress and logs on stderr; with `--json` stdout is one document."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, final

from rich.console import Console, ConsoleDimensions
from rich.filesize import decimal
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

USUAL_WIDTH, USUAL_HEIGHT = 80, 24  # of a terminal that does not know its own
PLAIN_WIDTH = 140  # columns where there is no terminal to ask
PLAIN_INTERVAL_SECONDS = 10.0  # between progress lines where there is no terminal to redraw
LEAST_BAR, WIDEST_BAR = 8, 40  # columns of a bar
SAID_COLUMNS = 50  # what may stand beside it
LEAST_COLUMN = 14  # columns of a cell of words: in a narrower one a table reads worse than a list

Advance = Callable[[int, int], None]
"""Receives how much is done, and of how much."""


@final
class Screen:
    """Both streams of one command. Use as a context: with `as_json` everything printed inside goes to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    @contextmanager
    def open(self) -> Iterator["Screen"]:
        """Guard stdout while the work runs."""
        if not self.as_json:
            yield self
            return
        with redirect_stdout(sys.stderr):
            yield self

    def log(self, text: str) -> None:
        """One message on stderr; a terminal gets it broken between words."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=not self.err.is_terminal)

    def say(self, text: str = "") -> None:
        """A line of the result; a terminal gets it broken between words."""
        if not self.as_json:
            self.out.print(text, markup=False, highlight=False, soft_wrap=not self.out.is_terminal)
            self.out.file.flush()

    def stream(self, piece: str) -> None:
        """Text of the result as it comes, without a line's end. A terminal is shown control characters, not sent them:
        a model may make any."""
        if not self.as_json:
            self.out.file.write(shown_text(piece) if self.out.is_terminal else piece)
            self.out.file.flush()

    def table(self, table: Table) -> None:
        """A table of the result; a list of its rows where the terminal is too narrow for its columns."""
        if self.as_json:
            return
        if _fits(table, self.out):
            self.out.print(table)
            return
        if table.title:
            self.out.print(Text(str(table.title), style="bold"))  # apart: the list may be narrower than its title
        self.out.print(_as_list(table))

    def document(self, value: dict[str, Any]) -> None:
        """The result as JSON, if that was asked for."""
        if self.as_json:
            self.out.file.write(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @contextmanager
    def progress(self, label: str, unit: str, waiting: str = "") -> Iterator[Advance]:
        """A bar with speed and time left; lines now and then where stderr is no terminal or cannot redraw a line.

        Until the first advance, which says the total, a bar without an end stands there, and if `waiting` says what is
        waited for, after the last one too.
        """
        if not self.err.is_terminal or self.err.is_dumb_terminal:
            yield _Lines(self, label, unit)
            return
        bar_columns = max(LEAST_BAR, min(WIDEST_BAR, self.err.width - SAID_COLUMNS - max(len(label), len(waiting))))
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_columns),
            TextColumn("{task.fields[said]}"),
        )
        with Progress(*columns, console=self.err, transient=True) as bars:
            yield _Bar(bars, bars.add_task(waiting or label, total=None, said=""), label, unit, waiting)


@final
class _Bar:
    """A bar on a terminal."""

    def __init__(self, bars: Progress, task: TaskID, label: str, unit: str, waiting: str) -> None:
        self.bars, self.task = bars, task
        self.label, self.unit, self.waiting = label, unit, waiting
        self.start = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done < total:
            said = _said(done, total, self.unit, time.monotonic() - self.start)
            self.bars.update(self.task, description=self.label, completed=done, total=total, said=said)
        else:
            self.bars.reset(self.task, total=None, description=self.waiting, said="", visible=bool(self.waiting))


@final
class _Lines:
    """Progress as lines of a log: one at the beginning where that is told, then at most one each
    `PLAIN_INTERVAL_SECONDS`."""

    def __init__(self, screen: Screen, label: str, unit: str) -> None:
        self.screen, self.label, self.unit = screen, label, unit
        self.start = self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if not done:
            self.screen.log(f"{self.label}: {decimal(total) if self.unit == 'bytes' else f'{total:,} {self.unit}'}")
            return
        now = time.monotonic()
        if now - self.last < PLAIN_INTERVAL_SECONDS and done < total:
            return
        self.last = now
        self.screen.log(f"{self.label}: {_said(done, total, self.unit, now - self.start)}")


def _said(done: int, total: int, unit: str, seconds: float) -> str:
    """How far, how fast, and what is left."""
    speed = done / max(seconds, 1e-9)
    left = f", {(total - done) / speed:,.0f} s left" if speed and done < total else ""
    if unit == "bytes":
        return f"{decimal(done)} of {decimal(total)}, {decimal(int(speed))}/s{left}"
    return f"{done:,} of {total:,} {unit}, {f'{speed:,.0f}' if speed >= 10 else f'{speed:.2g}'}/s{left}"


def grid(*columns: str, title: str = "", right: tuple[int, ...] = ()) -> Table:
    """An empty table; the numbered columns are set flush right."""
    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    return table


def rounded(value: Any, digits: int = 6) -> Any:
    """JSON with floats of `digits` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def _console(stream: Any) -> Console:
    is_terminal = bool(stream.isatty())
    console = Console(
        file=stream, width=None if is_terminal else PLAIN_WIDTH, force_terminal=is_terminal, highlight=False
    )
    if console.is_dumb_terminal:  # rich takes these for 80 columns wide, whatever they are
        size = os.get_terminal_size(stream.fileno())  # zeros where nobody has said: ssh -tt, docker -t, script
        console.size = ConsoleDimensions(size.columns or USUAL_WIDTH, size.lines or USUAL_HEIGHT)
    return console


def shown_text(piece: str) -> str:
    """Control characters as the symbols that stand for them; lines and tabs as they are."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in piece)


def _fits(table: Table, console: Console) -> bool:
    """Whether every column gets the width of its longest word, or LEAST_COLUMN where a word is longer than that."""
    options = console.options.update(max_width=10_000)
    wanted = [
        max(
            min(Measurement.get(console, options, cell).minimum, LEAST_COLUMN)
            for cell in (column.header, *column.cells)
        )
        for column in table.columns
    ]
    return sum(wanted) + 3 * len(wanted) + 1 <= console.width


def _as_list(table: Table) -> Table:
    """A heading of each row, its first cell, and below it what stands in the other columns."""
    found = Table.grid()
    for row in zip(*(column.cells for column in table.columns), strict=True):
        found.add_row(Text(f"{table.columns[0].header} {row[0]}", style="bold"))
        cells = Table.grid(padding=(0, 2))
        cells.add_column(max_width=LEAST_COLUMN + 4)
        cells.add_column(overflow="fold")
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            if str(cell):
                cells.add_row(Text(str(column.header)), Text(str(cell)))
        found.add_row(Padding(cells, (0, 0, 1, 2)))
    return found
