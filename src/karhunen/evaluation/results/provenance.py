"""Where a result comes from: commit, versions, machine, time. Recorded beside every number, part of no fingerprint."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import final

import torch

PACKAGES = ("karhunen", "torch", "transformers", "numpy", "numba", "lm-eval")


@final
@dataclass(frozen=True)
class Provenance:
    """`commit` ends in + where files were changed since; it is empty outside a git checkout."""

    commit: str
    versions: dict[str, str]
    machine: str
    n_threads: int
    date: str


def provenance() -> Provenance:
    """Commit, versions and machine as they are now."""
    where = f"{_processor()}, {os.cpu_count()} cores"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Provenance(_commit(), _versions(), where, torch.get_num_threads(), now)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    folder = Path(__file__).parents[2]  # the package: whatever of it was altered counts
    head = _git(folder, "rev-parse", "--short=10", "HEAD")
    if not head:
        return ""
    return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
