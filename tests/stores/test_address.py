"""A store is opened by what a person writes, and lists what it keeps."""

import time
from pathlib import Path
from socket import socket

import pytest

from karhunen.stores import DirectoryStore, RedisStore, UrlStore, open_store


def test_addresses(tmp_path: Path) -> None:
    for address in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"):
        store = open_store(address, max_bytes=100)
        assert isinstance(store, DirectoryStore) and store.folder == tmp_path / "a b" and store.max_bytes == 100
    assert isinstance(open_store("redis://127.0.0.1:1/0"), RedisStore)
    assert isinstance(open_store("memory://pages"), UrlStore)


@pytest.mark.parametrize("address", ["redis://127.0.0.1:1/0", "memory://pages"])
def test_a_limit_that_would_do_nothing_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="takes no limit"):
        open_store(address, max_bytes=100)


def test_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="has no address"):
        open_store("")


def test_a_redis_server_that_is_away_fails_at_once() -> None:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store, start = open_store(f"redis://127.0.0.1:{port}/0"), time.perf_counter()
    with pytest.raises(Exception, match="onnect"):
        store.has("a")
    assert time.perf_counter() - start < 1.0
