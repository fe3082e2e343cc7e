"""Prose and verse of other centuries than the calibration text's: works of the Canterbury corpus, in Brotli's sources.

Source: Arnold and Bell, A corpus for the evaluation of lossless compression algorithms (DCC 1997); files as the source
archive of the package `brotli` carries them. Known by SHA-256, whatever the index serves, and kept beside the models.
"""

import hashlib
from functools import partial
from pathlib import Path

from karhunen.hf.embedded import default_cache_dir
from karhunen.hf.kept import keep
from karhunen.hf.packages import PackageUnavailable, download, open_member

PACKAGE, SHA256 = "brotli==1.2.1", "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de"
FOLDER_IN_ARCHIVE = "brotli-1.2.1/tests/testdata"
WORKS = {
    "asyoulik": "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc",  # Shakespeare, As You Like It
    "alice29": "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0",  # Carroll, Alice's Adventures, 1865
    "plrabn12": "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c",  # Milton, Paradise Lost, 1667
}
"""SHA-256 of each file, under its name in the corpus."""


def work(name: str) -> str:
    """The text of a work, fetched at the first call; its lines end in line feeds, whatever they end in there.

    ValueError in one line that says why, and what can be measured without.
    """
    folder = default_cache_dir().parent / "texts" / PACKAGE.replace("==", "-")
    try:
        keep(folder, partial(_is_complete, folder), _fetch)
    except (PackageUnavailable, OSError) as error:
        raise ValueError(
            f"the literature to score on is in the source archive of {PACKAGE}, and that cannot be had: {error}; "
            "a task without literature needs none of it, such as texts:test@1,1,0"
        ) from error
    text = (folder / f"{name}.txt").read_bytes().decode("ascii")
    return text.replace("\r\n", "\n").rstrip("\x1a\n") + "\n"  # MS-DOS ends a text with 1A


def _is_complete(folder: Path) -> bool:
    try:
        return all(_hash(folder / f"{name}.txt") == sha256 for name, sha256 in WORKS.items())
    except OSError:
        return False


def _fetch(scratch: Path) -> Path:
    """A folder of all works, out of an archive that is opened only if its hash is the known one."""
    archive = download(PACKAGE, scratch / "archive", scratch, lambda *_: None, sdist_sha256=SHA256)
    finished = scratch / "texts"
    finished.mkdir()
    if (found := _hash(archive)) != SHA256:
        raise PackageUnavailable(f"{archive.name} has sha256 {found}, wanted {SHA256}; nothing was kept")
    for name, sha256 in WORKS.items():
        with open_member(archive, f"{FOLDER_IN_ARCHIVE}/{name}.txt") as file:
            (finished / f"{name}.txt").write_bytes(file.read())
        if (found := _hash(finished / f"{name}.txt")) != sha256:
            raise PackageUnavailable(f"{name}.txt has sha256 {found}, wanted {sha256}; nothing was kept")
    return finished


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
