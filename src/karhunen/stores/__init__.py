"""Where pages are kept: memory, a folder, any fsspec address, Redis. None of them knows what a page is."""

from karhunen.stores.address import open_store
from karhunen.stores.base import Store
from karhunen.stores.counted import Counted, Counts
from karhunen.stores.directory import DirectoryStore
from karhunen.stores.memory import MemoryStore
from karhunen.stores.redis import RedisStore
from karhunen.stores.url import UrlStore

__all__ = ["Counted", "Counts", "DirectoryStore", "MemoryStore", "RedisStore", "Store", "UrlStore", "open_store"]
