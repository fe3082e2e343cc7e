"""What is shown and where: results on stdout, progress and logs on stderr; with `--json` stdout is one document."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_WIDTH = 140  # columns where there is no terminal to ask
PLAIN_INTERVAL_SECONDS = 10.0  # between progress lines where there is no terminal to redraw

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
        """One line on stderr."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str = "", end: str = "\n") -> None:
        """Text of the result, as it comes."""
        if not self.as_json:
            self.out.print(text, end=end, markup=False, highlight=False, soft_wrap=True)
            self.out.file.flush()

    def table(self, table: Table) -> None:
        """A table of the result."""
        if not self.as_json:
            self.out.print(table)

    def document(self, value: dict[str, Any]) -> None:
        """The result as JSON, if that was asked for."""
        if self.as_json:
            self.out.file.write(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @contextmanager
    def progress(self, label: str, unit: str) -> Iterator[Advance]:
        """A bar with speed and time left; lines now and then where stderr is no terminal."""
        if not self.err.is_terminal:
            yield _Lines(self, label, unit)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} / {task.total:,.0f} " + unit),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(label, total=None, speed="")

            def advance(done: int, total: int) -> None:
                speed = bar.tasks[0].speed
                shown = f"{speed:,.0f} {unit}/s" if speed else ""
                bar.update(task, completed=done, total=total, speed=shown)

            yield advance


@final
class _Lines:
    """Progress as lines of a log, at most one each `PLAIN_INTERVAL_SECONDS`."""

    def __init__(self, screen: Screen, label: str, unit: str) -> None:
        self.screen, self.label, self.unit = screen, label, unit
        self.start = self.last = time.monotonic()
        self.first = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last < PLAIN_INTERVAL_SECONDS and done < total:
            return
        self.last = now
        speed = done / max(now - self.start, 1e-9)
        left = f", {(total - done) / speed:.0f} s left" if speed and done < total else ""
        self.screen.log(f"{self.label}: {done:,} of {total:,} {self.unit}, {speed:,.0f} {self.unit}/s{left}")


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
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)
