"""Pages in this process's memory, the least recently used dropped to make room."""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import final

from karhunen.stores.base import Store, check_key, check_size


@final
class MemoryStore(Store):
    """At most `max_bytes` of pages; None: as many as there are. Threads may share it."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._n_bytes = 0
        self._lock = Lock()

    def get(self, key: str) -> bytes | None:
        """As in `Store`."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: str, data: bytes) -> None:
        """As in `Store`; ValueError if it is larger than the store."""
        check_key(key)
        check_size(data, self.max_bytes)
        with self._lock:
            self._n_bytes += len(data) - len(self._held.pop(key, b""))
            self._held[key] = bytes(data)
            while self.max_bytes is not None and self._n_bytes > self.max_bytes:
                self._n_bytes -= len(self._held.popitem(last=False)[1])

    def has(self, key: str) -> bool:
        """As in `Store`."""
        return key in self._held

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        """As in `Store`, all at one moment."""
        with self._lock:
            return [key in self._held for key in keys]

    def remove(self, key: str) -> None:
        """As in `Store`."""
        with self._lock:
            self._n_bytes -= len(self._held.pop(key, b""))

    def keys(self) -> list[str]:
        """As in `Store`, the least recently used first."""
        with self._lock:
            return list(self._held)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages that are held now."""
        return self._n_bytes
