"""A store that never stands in the way: what fails is a miss, and everything is counted.

A reader can go on without a page, so a server that is down, a full disk or a folder that is gone must not end its work;
but a store that keeps nothing must not look like one that works. `counts` says what happened, with the last reason.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, TypeVar, final

from karhunen.stores.base import Store

Result = TypeVar("Result")


@final
@dataclass
class Counts:
    """What a store was asked, and what came of it. `refusals` are pages that were found and not taken, counted among
    the misses; `failures` are calls that the backend did not do; `last_reason` is that of the last of either."""

    hits: int = 0
    misses: int = 0
    refusals: int = 0
    failures: int = 0
    puts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_reading: float = 0.0
    seconds_writing: float = 0.0
    last_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`."""
        return asdict(self)


@final
class Counted(Store):
    """`inner`, whose failures are misses."""

    def __init__(self, inner: Store) -> None:
        if not isinstance(inner, Store):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(  # a path, say: every call would fail, and be a miss for ever
                f"{inner!r} is not a store; give one of karhunen.stores, such as DirectoryStore(folder)"
            )
        self.inner = inner
        self.counts = Counts()
        self._lock = Lock()

    def get(self, key: str) -> bytes | None:
        """The bytes, or None whatever the reason."""
        start = time.perf_counter()
        data = self._tried(lambda: self.inner.get(key), None)
        with self._lock:
            self.counts.seconds_reading += time.perf_counter() - start
            self.counts.hits += data is not None
            self.counts.misses += data is None
            self.counts.bytes_read += len(data or b"")
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep it if that can be done."""
        self.kept(key, data)

    def kept(self, key: str, data: bytes) -> bool:
        """As `put`; says whether it was done."""
        start = time.perf_counter()

        def put() -> bool:
            self.inner.put(key, data)
            return True

        done = self._tried(put, False)
        with self._lock:
            self.counts.seconds_writing += time.perf_counter() - start
            self.counts.puts += done
            self.counts.bytes_written += len(data) if done else 0
        return done

    def has(self, key: str) -> bool:
        """Whether it is there and can be asked for."""
        return self._tried(lambda: self.inner.has(key), False)

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        """As `has` for each key; none is there if the backend does not answer."""
        return self._tried(lambda: self.inner.has_many(keys), [False] * len(keys))

    def remove(self, key: str) -> None:
        """Remove it if that can be done."""
        self._tried(lambda: self.inner.remove(key), None)

    def keys(self) -> list[str]:
        """Of all that is there; none if it cannot be asked for."""
        return self._tried(lambda: list(self.inner.keys()), [])

    def refuse(self, key: str, reason: str) -> None:
        """What `get` gave for this key was not what its reader wanted: a miss after all. It is removed, so that what is
        right can take its place."""
        with self._lock:
            self.counts.hits -= 1
            self.counts.misses += 1
            self.counts.refusals += 1
            self.counts.last_reason = reason
        self.remove(key)

    def failed(self, reason: str) -> None:
        """Something could not be made for this store."""
        with self._lock:
            self.counts.failures += 1
            self.counts.last_reason = reason

    def _tried(self, call: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # a backend may raise anything; the reader goes on without the page
            self.failed(" ".join(f"{type(error).__name__}: {error}".split()))
            return otherwise
