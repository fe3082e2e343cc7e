"""A store by its address: what a person writes on a command line or in a configuration.

/some/folder, ./folder, file:///some/folder     DirectoryStore
redis://host:6379/0, rediss://…, unix://…       RedisStore
s3://bucket/pages, gs://…, any of fsspec's      UrlStore
"""

from urllib.parse import unquote, urlsplit

from karhunen.stores.base import Store
from karhunen.stores.directory import DirectoryStore
from karhunen.stores.redis import RedisStore
from karhunen.stores.url import UrlStore

REDIS = ("redis", "rediss", "unix")


def open_store(address: str, max_bytes: int | None = None, timeout_seconds: float = 5.0) -> Store:
    """The store at an address; a Redis server is asked at most `timeout_seconds` and once more after a lost connection.

    ValueError if there is no address, or `max_bytes` for a store that has no limit of ours.
    """
    if not address:
        raise ValueError("a store has no address; give a folder, redis://host:6379/0, or an address of fsspec's")
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme in ("", "file"):
        return DirectoryStore(unquote(urlsplit(address).path) if scheme else address, max_bytes)
    if max_bytes is not None:
        raise ValueError(f"{address} takes no limit of bytes from here; set it where the store is kept")
    if scheme in REDIS:
        return RedisStore.at(address, timeout_seconds)
    return UrlStore(address)
