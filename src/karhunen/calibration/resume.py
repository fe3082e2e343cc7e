"""Partial sums of a calibration on disk, so that an interrupted one goes on instead of beginning again.

Each state is a folder of its own, `<fingerprint of the inputs>-<sequences done>`, that appears whole; the one before
is removed after it. States of other inputs are never read.
"""

import time
from pathlib import Path
from typing import final

from karhunen.folder import remove_folder
from karhunen.statistics.artifact import FORMAT, load_statistics, save_statistics
from karhunen.statistics.gathered import Statistics

# Seconds between states: what an interruption may cost.
INTERVAL_SECONDS = 20.0


@final
class Partial:
    """The saved state of one calibration, named by its inputs."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.saved_at = time.monotonic()

    def load(self) -> tuple[int, Statistics] | None:
        """Sequences done and their sums; None if there is no whole state of these inputs."""
        for n_done, path in sorted(self._states(), reverse=True):
            try:
                return n_done, load_statistics(path)
            except ValueError:
                continue  # damaged: an earlier state, or the beginning, will do
        return None

    def save(self, n_done: int, statistics: Statistics) -> None:
        """Keep this state, if the last one is old enough to be worth it."""
        if time.monotonic() - self.saved_at < INTERVAL_SECONDS:
            return
        before = self._states()
        save_statistics(statistics, self.folder / f"{self.name}-{n_done:08d}")
        for _, path in before:
            remove_folder(path, FORMAT)
        self.saved_at = time.monotonic()

    def clear(self) -> None:
        """Remove every state of these inputs, and the folder if nothing else is in it."""
        for _, path in self._states():
            remove_folder(path, FORMAT)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _states(self) -> list[tuple[int, Path]]:
        found = self.folder.glob(f"{self.name}-*") if self.folder.is_dir() else ()
        named = [(path.name.rpartition("-")[2], path) for path in found]
        return [(int(number), path) for number, path in named if number.isdecimal()]
