"""Pages as files of a folder that several processes share and any of them may be killed over.

    FOLDER/ab/abcdef….page     a page, under the first two characters of its key
    FOLDER/.work/…             what is being written; renamed into place, so a page is there whole or not at all
    FOLDER/.lock  .total       who counts now; the bytes of all pages, as 8 little-endian bytes

A process that dies leaves at most a file in `.work`, which the next one removes after an hour. Nothing is flushed to
the medium: what a power cut tears, the page's checksum finds. A page that is read becomes the newest; the oldest go
first when there is no room. The count is taken anew whenever pages have to go.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import final

import filelock

from karhunen.stores.base import Store, check_key, check_size

SUFFIX = ".page"
STALE_SECONDS = 3600.0  # no page takes so long to write


@final
class DirectoryStore(Store):
    """At most `max_bytes` of pages; None: as many as the disk holds. ValueError if `folder` is a file."""

    def __init__(self, folder: str | Path, max_bytes: int | None = None) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.max_bytes = max_bytes
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; pages are kept in one")
        self._work = self.folder / ".work"
        self._work.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self.folder / ".lock")
        self._clear_stale()
        if max_bytes is not None:
            with self._lock:
                self._make_room(self._total_of_files())

    def get(self, key: str) -> bytes | None:
        """As in `Store`."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        with suppress(FileNotFoundError):  # dropped since, by another process
            os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> None:
        """As in `Store`; ValueError if it is larger than the store."""
        path = self._path(key)
        check_size(data, self.max_bytes)
        work = self._work / f"{os.getpid()}-{token_hex(8)}"
        try:
            work.write_bytes(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.max_bytes is None:
                work.replace(path)
                return
            with self._lock:
                before = _size(path)
                work.replace(path)
                self._make_room(self._total + len(data) - before)
        finally:
            work.unlink(missing_ok=True)

    def has(self, key: str) -> bool:
        """As in `Store`."""
        return self._path(key).is_file()

    def remove(self, key: str) -> None:
        """As in `Store`."""
        path = self._path(key)
        if self.max_bytes is None:
            path.unlink(missing_ok=True)
            return
        with self._lock:
            before = _size(path)
            path.unlink(missing_ok=True)
            self._note(max(0, self._total - before))

    def keys(self) -> list[str]:
        """Of all pages, the least recently used first."""
        return [path.name.removesuffix(SUFFIX) for _, _, path in sorted(self._files())]

    @property
    def n_bytes(self) -> int:
        """Of all pages, counted now."""
        return self._total_of_files()

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.folder / key[:2] / f"{key}{SUFFIX}"

    def _make_room(self, total: int) -> None:
        """Drop the oldest until the pages fit, and note what is left; the caller holds the lock."""
        assert self.max_bytes is not None, "only a limit asks for room"
        if total > self.max_bytes:
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= self.max_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= size
        self._note(total)

    @property
    def _total(self) -> int:
        """As noted; counted if the note is missing or torn."""
        try:
            noted = (self.folder / ".total").read_bytes()
        except FileNotFoundError:
            noted = b""
        return int.from_bytes(noted, "little") if len(noted) == 8 else self._total_of_files()

    def _note(self, total: int) -> None:
        work = self._work / f"{os.getpid()}-{token_hex(8)}"
        work.write_bytes(total.to_bytes(8, "little"))
        work.replace(self.folder / ".total")

    def _total_of_files(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(nanoseconds of last use, bytes, path) of every page."""
        for path in self.folder.glob(f"??/*{SUFFIX}"):
            with suppress(FileNotFoundError):
                found = path.stat()
                yield found.st_mtime_ns, found.st_size, path

    def _clear_stale(self) -> None:
        for path in self._work.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
