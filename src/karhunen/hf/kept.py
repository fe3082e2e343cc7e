"""A folder that is made once and kept: whole or not there, however many ask for it at once.

The work happens in a hidden folder beside it and ends in one rename; a lock file lets a second process wait and find
the first one's work.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import filelock

from karhunen.folder import open_to_readers


def keep(target: Path, is_complete: Callable[[], bool], build: Callable[[Path], Path]) -> Path:
    """`target`, made by `build` unless it is complete. `build` gets a folder to work in, which is removed afterwards,
    and returns the finished folder inside it."""
    if is_complete():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(target.parent / f".{target.name}.lock"):
        if is_complete():  # another process may have finished while this one waited
            return target
        for stale in target.parent.glob(f".{target.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed: the lock says nobody works there
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            finished = build(work)
            open_to_readers(finished)
            shutil.rmtree(target, ignore_errors=True)  # an incomplete or outdated folder, or nothing
            finished.replace(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target
