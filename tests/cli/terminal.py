"""A command line run in this process with a real pseudo-terminal as its stdin, stdout and stderr."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from karhunen.cli import run

CTRL_C = b"\x03"
SOURCE = Path(__file__).parents[2] / "src"
COMMAND = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); from karhunen.cli import main; main()"
)
"""The command as a process of its own whose terminal is the one at its stdin, so that keys reach it as signals. What a
script runs in the background has Ctrl-C ignored, and so has all that it starts, unless told otherwise."""
LONGEST_SECONDS = 240

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


def interrupted_in_terminal(arguments: list[str], columns: int, when: str) -> Shown:
    """Run the command as a process of its own, and press Ctrl-C once what it shows matches `when`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**environment, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)
    sent = b""
    overdue = threading.Timer(LONGEST_SECONDS, child.kill)
    overdue.start()
    try:
        while not re.search(when, ESCAPE.sub("", sent.decode(errors="replace"))):
            piece = _read(ours)
            assert piece, f"it ended before {when!r} was shown: {sent.decode(errors='replace')}"
            sent += piece
        os.write(ours, CTRL_C)
        sent += read_to_end(ours).encode()
        code = child.wait(30)
    finally:
        overdue.cancel()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.close(ours)
    return Shown(code, "", sent.decode())


def read_to_end(descriptor: int) -> str:
    """All that is sent until nobody holds the other end."""
    return b"".join(iter(lambda: _read(descriptor), b"")).decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


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
