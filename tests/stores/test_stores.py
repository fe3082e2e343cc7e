"""One contract for every store; what fails is a miss and counted; a folder survives kill -9 and several processes."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest

from karhunen.stores import Counted, DirectoryStore, MemoryStore, RedisStore, Store, UrlStore

SOURCE = Path(__file__).parent.parent.parent / "src"
KINDS = ("memory", "directory", "directory with a limit", "url of memory", "url of files", "redis", "counted")


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own on a free port; skips, saying so, where there is none to start."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server on this machine")
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([server, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        import redis

        client = redis.Redis(port=port)
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        client.close()
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made = {
        "memory": MemoryStore,
        "directory": lambda: DirectoryStore(tmp_path / "pages"),
        "directory with a limit": lambda: DirectoryStore(tmp_path / "pages", 1 << 20),
        "url of memory": lambda: UrlStore(f"memory://{tmp_path.name}"),
        "url of files": lambda: UrlStore(f"file://{tmp_path}/pages"),
        "redis": lambda: RedisStore(request.getfixturevalue("redis_url"), f"{tmp_path.name}:", ttl_seconds=100),
        "counted": lambda: Counted(MemoryStore()),
    }
    return made[request.param]()


def test_every_store_gives_back_what_was_put(store: Store) -> None:
    data = bytes(range(256)) * 100
    assert store.get("ab12") is None
    assert not store.has("ab12")
    store.put("ab12", data)
    store.put("ab13", b"")
    assert store.get("ab12") == data
    assert store.get("ab13") == b""
    assert store.has("ab12")
    store.put("ab12", b"other")
    assert store.get("ab12") == b"other"
    assert sorted(store.keys()) == ["ab12", "ab13"]
    store.remove("ab12")
    store.remove("ab12")
    assert store.get("ab12") is None
    assert store.get("ab13") == b""
    assert list(store.keys()) == ["ab13"]


def test_many_keys_are_asked_for_in_their_order(store: Store) -> None:
    keys = [f"key{i}" for i in range(40)]
    for key in keys[::3]:
        store.put(key, b"x")
    assert store.has_many(keys) == [i % 3 == 0 for i in range(40)]
    assert store.has_many(keys[::-1]) == [i % 3 == 0 for i in range(40)][::-1]
    assert store.has_many([]) == []


def test_redis_is_asked_for_many_keys_in_one_round_trip(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import redis

    store = RedisStore(redis_url, "trips:")
    store.put("key1", b"x")
    sent: list[int] = []
    send = redis.connection.Connection.send_packed_command

    def counted(self: redis.connection.Connection, command: list[bytes], check_health: bool = True) -> None:
        sent.append(len(command))
        send(self, command, check_health)

    monkeypatch.setattr(redis.connection.Connection, "send_packed_command", counted)
    assert store.has_many([f"key{i}" for i in range(50)]) == [i == 1 for i in range(50)]
    assert len(sent) == 1


@pytest.mark.parametrize("key", ["", "../x", "a/b", ".lock", "a b", "x" * 129])
def test_no_key_names_a_place_outside(store: Store, key: str) -> None:
    if isinstance(store, Counted):
        store.put(key, b"x")
        assert store.counts.failures == 1
        return
    with pytest.raises(ValueError, match="not a key"):
        store.put(key, b"x")


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_the_least_recently_used_go_first(kind: str, tmp_path: Path) -> None:
    store = MemoryStore(400) if kind == "memory" else DirectoryStore(tmp_path, 400)
    for i in range(4):
        store.put(f"key{i}", bytes(100))
        time.sleep(0.01)
    assert store.get("key0") is not None
    time.sleep(0.01)
    store.put("key4", bytes(150))
    assert [store.has(f"key{i}") for i in range(5)] == [True, False, False, True, True]
    assert store.n_bytes == 350
    with pytest.raises(ValueError, match="401 bytes do not fit a store of 400"):
        store.put("large", bytes(401))
    store.remove("key4")
    assert store.n_bytes == 200


def test_a_folder_that_was_left_over_its_limit_is_brought_below_it(tmp_path: Path) -> None:
    free = DirectoryStore(tmp_path)
    for i in range(5):
        free.put(f"key{i}", bytes(100))
        time.sleep(0.01)
    assert DirectoryStore(tmp_path, 250).keys() == ["key3", "key4"]
    (tmp_path / ".total").write_bytes(b"torn")
    store = DirectoryStore(tmp_path, 250)
    store.put("key5", bytes(100))
    assert store.keys() == ["key4", "key5"]
    with pytest.raises(ValueError, match="not a folder"):
        DirectoryStore(tmp_path / ".total")


def test_what_a_dead_process_was_writing_is_removed_after_an_hour(tmp_path: Path) -> None:
    DirectoryStore(tmp_path)
    old, new = tmp_path / ".work" / "1-old", tmp_path / ".work" / "2-new"
    for path in (old, new):
        path.write_bytes(b"half a pa")
    os.utime(old, (0, 0))
    store = DirectoryStore(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)
    assert store.keys() == []


def test_a_store_that_fails_is_a_miss_and_says_so(tmp_path: Path) -> None:
    """A server that is not there; a folder that became a file."""
    absent = Counted(RedisStore("redis://127.0.0.1:1/0", socket_connect_timeout=0.2))
    lost = Counted(DirectoryStore(tmp_path / "lost"))
    shutil.rmtree(tmp_path / "lost")
    (tmp_path / "lost").write_text("a file")
    for store, words in ((absent, "ConnectionError"), (lost, "NotADirectoryError")):
        assert store.get("ab12") is None
        assert not store.kept("ab12", b"x")
        assert not store.has("ab12") or store is lost
        store.remove("ab12")
        counts = store.counts
        assert (counts.hits, counts.misses, counts.puts) == (0, 1, 0)
        assert counts.failures >= 2
        assert words in counts.last_reason


def test_what_is_no_store_is_refused_at_once() -> None:
    """In an interpreter without the types' checks of tests, as users have it: a path would be a miss for ever."""
    source = "from karhunen.stores import Counted\ntry: Counted('pages')\nexcept TypeError as error: print(error)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("'pages' is not a store")


def test_everything_is_counted() -> None:
    store = Counted(MemoryStore())
    store.put("one", bytes(10))
    store.get("one")
    store.get("two")
    store.get("one")
    store.refuse("one", "a damaged page")
    counts = store.counts.to_dict()
    assert counts.pop("seconds_reading") > 0
    assert counts.pop("seconds_writing") > 0
    assert counts == {
        "hits": 1, "misses": 2, "refusals": 1, "failures": 0, "puts": 1, "bytes_read": 20, "bytes_written": 10,
        "last_reason": "a damaged page",
    }  # fmt: skip
    assert store.get("one") is None


WRITER = """
import hashlib, os, random, signal, sys, time
from karhunen.stores.directory import DirectoryStore

def page(rng):
    body = rng.randbytes(rng.randrange(1000, 200_000))
    return hashlib.sha256(body).digest() + body

def write(folder, limit, seed, seconds):
    rng, store, end = random.Random(seed), DirectoryStore(folder, limit), time.monotonic() + seconds
    while time.monotonic() < end:
        store.put(f"{rng.randrange(40):02d}page", page(rng))
        store.get(f"{rng.randrange(40):02d}page")

folder, limit, mode = sys.argv[1], int(sys.argv[2]) or None, sys.argv[3]
if mode == "kill":
    rng = random.Random(0)
    for i in range(int(sys.argv[4])):
        child = os.fork()
        if child == 0:
            write(folder, limit, i, 60)
            os._exit(0)
        time.sleep(rng.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
else:
    write(folder, limit, int(sys.argv[4]), float(sys.argv[5]))
"""


def whole(data: bytes) -> bool:
    return hashlib.sha256(data[32:]).digest() == data[:32]


def writer(folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(folder), *map(str, arguments)]
    return subprocess.Popen(command, cwd=SOURCE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1_000_000])
def test_killed_at_200_random_moments_every_page_is_whole_or_absent(tmp_path: Path, limit: int) -> None:
    process = writer(tmp_path, limit, "kill", 200)
    assert process.communicate(timeout=120) == (None, "")
    assert process.returncode == 0
    store = DirectoryStore(tmp_path, limit or None)
    keys = store.keys()
    assert len(keys) > 5
    assert all(whole(data) for key in keys if (data := store.get(key)) is not None)
    assert not limit or store.n_bytes <= limit
    store.put("after", b"it goes on")
    assert store.get("after") == b"it goes on"


@pytest.mark.slow
def test_processes_hammer_one_folder(tmp_path: Path) -> None:
    """Three write, read and drop the same keys, a fourth (this one) reads: whole pages or none, never over the limit
    by more than what is being counted."""
    limit, processes = 1_000_000, [writer(tmp_path, 1_000_000, "write", seed, 3) for seed in range(3)]
    store, rng, hits = DirectoryStore(tmp_path, limit), random.Random(9), 0
    while any(process.poll() is None for process in processes):
        data = store.get(f"{rng.randrange(40):02d}page")
        hits += data is not None
        assert data is None or whole(data)
    assert [process.communicate() for process in processes] == [(None, "")] * 3
    assert all(process.returncode == 0 for process in processes)
    assert hits > 50
    assert 0 < store.n_bytes <= limit
    noted = int.from_bytes((tmp_path / ".total").read_bytes(), "little")
    assert noted == store.n_bytes
    assert not list((tmp_path / ".work").iterdir())
