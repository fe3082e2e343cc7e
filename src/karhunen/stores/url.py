"""Pages at any address that fsspec knows: `s3://…`, `gs://…`, `abfs://…`, `sftp://…`, `memory://…`.

Object stores take an object whole or not at all. Elsewhere a page is written beside its place and moved into it; what a
file system tears nevertheless, the page's checksum finds.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any, final

from karhunen.stores.base import Store, check_key

WHOLE = frozenset({"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "r2", "hf"})
"""Protocols whose `pipe_file` is all or nothing."""
N_AT_ONCE = 16  # questions on their way


@final
class UrlStore(Store):
    """Pages below `url`; `options` go to fsspec (credentials, endpoints). There is no size limit: set one there."""

    def __init__(self, url: str, **options: Any) -> None:
        import fsspec

        self.url = url
        self._fs: Any
        self._root: str
        self._fs, self._root = fsspec.core.url_to_fs(url, **options)  # type: ignore[attr-defined]
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple | list) else (self._fs.protocol,)
        self._whole = not WHOLE.isdisjoint(protocols)

    def get(self, key: str) -> bytes | None:
        """As in `Store`."""
        try:
            return bytes(self._fs.cat_file(self._path(key)))
        except FileNotFoundError:
            return None

    def put(self, key: str, data: bytes) -> None:
        """As in `Store`."""
        path = self._path(key)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if self._whole:
            self._fs.pipe_file(path, data)
            return
        work = f"{path}.{token_hex(8)}"
        self._fs.pipe_file(work, data)
        self._fs.mv(work, path)

    def has(self, key: str) -> bool:
        """As in `Store`."""
        return bool(self._fs.exists(self._path(key)))

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        """As in `Store`, many questions at once: fsspec has none for several objects."""
        if len(keys) < 2:
            return [self.has(key) for key in keys]
        with ThreadPoolExecutor(min(len(keys), N_AT_ONCE)) as pool:
            return list(pool.map(self.has, keys))

    def remove(self, key: str) -> None:
        """As in `Store`."""
        path = self._path(key)
        if self._fs.exists(path):
            self._fs.rm_file(path)

    def keys(self) -> Iterator[str]:
        """As in `Store`."""
        if self._fs.exists(self._root):
            for path in self._fs.find(self._root):
                name = path.rpartition("/")[2]
                if name.endswith(".page"):
                    yield name.removesuffix(".page")

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._root.rstrip('/')}/{key[:2]}/{key}.page"
