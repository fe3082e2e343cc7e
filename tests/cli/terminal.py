"""A command line run in this process with a real pseudo-terminal as its stdin, stdout and stderr."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from karhunen.cli import run

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Shown:
    """Exit code, what a pipe or file at stdout got, and all that the terminal was sent."""

    code: int
    out: str
    sent: str

    @property
    def text(self) -> str:
        """What was sent without colours and cursor movements."""
        return ESCAPE.sub("", self.sent)

    @property
    def lines(self) -> list[str]:
        """Everything that ever stood on one line: a carriage return begins it anew."""
        return [line for line in re.split(r"[\r\n]+", self.text) if line]


def run_in_terminal(arguments: list[str], columns: int, out: Path | None = None) -> Shown:
    """Run `karhunen`; with `out`, stdout is that file and the terminal is stdin and stderr only."""
    return in_terminal(lambda: run(arguments), columns, out)


def in_terminal(work: Callable[[], int], columns: int, out: Path | None = None) -> Shown:
    """Do `work` with a terminal of so many columns."""
    ours, theirs = pty.openpty()
    sizes = {name: os.environ.pop(name) for name in ("COLUMNS", "LINES") if name in os.environ}  # readline sets them
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    sent: list[str] = []
    reader = threading.Thread(target=lambda: sent.append(read_to_end(ours)))
    reader.start()
    try:
        stdout = theirs if out is None else os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with _standard_streams(theirs, stdout):
            code = work()
        if out is not None:
            os.close(stdout)
    finally:
        os.close(theirs)  # the last writer: the reader comes to the end
        reader.join()
        os.close(ours)
        os.environ.update(sizes)
    return Shown(code, out.read_text(encoding="utf-8") if out is not None else "", sent[0])


def read_to_end(descriptor: int) -> str:
    """All that is sent until nobody holds the other end."""
    sent: list[bytes] = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # how Linux says that the other end is closed
            piece = b""
        if not piece:
            return b"".join(sent).decode()
        sent.append(piece)


@contextmanager
def _standard_streams(terminal: int, out: int) -> Iterator[None]:
    """The three descriptors and Python's streams, both back as they were afterwards."""
    before = sys.stdin, sys.stdout, sys.stderr
    kept = [os.dup(number) for number in (0, 1, 2)]
    streams: list[TextIO] = []
    try:
        for number, descriptor in enumerate((terminal, out, terminal)):
            os.dup2(descriptor, number)
            streams.append(os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
        sys.stdin, sys.stdout, sys.stderr = streams
        yield
    finally:
        for stream in streams[1:]:
            stream.flush()
        sys.stdin, sys.stdout, sys.stderr = before
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
