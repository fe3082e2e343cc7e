"""Workers of `--jobs`: none outlives the process that asked for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import time
from multiprocessing import get_context
from pathlib import Path
import os, sys

def work(path):
    from karhunen.evaluation.workers import end_with_parent
    end_with_parent()
    Path(path).write_text(str(os.getpid()))
    time.sleep(300)

if __name__ == "__main__":
    process = get_context("spawn").Process(target=work, args=(sys.argv[1],))
    process.start()
    process.join()
"""


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script, note = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(PARENT, encoding="utf-8")
    parent = subprocess.Popen([sys.executable, str(script), str(note)])
    until(lambda: note.is_file() and note.read_text().isdigit(), 60)
    worker = int(note.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not runs(worker), 10)


def until(holds, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] == "Z")  # no one may reap it here
