"""`karhunen serve`, as people run it: metrics, two servers and one store, and what happens when things die."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.serving.engine.models import calibrated, save, words

from karhunen.pages.frame import read
from karhunen.stores import open_store

pytestmark = pytest.mark.timeout(900)

START_SECONDS = 600
N_TOKENS, N_PAGES, RESTORED = 700, 5, 4  # 128 tokens are read in any case
ENGINE = [
    "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8",
    "--no-enable-prefix-caching", "--distributed-executor-backend", "uni", "--served-model-name", "m",
]  # fmt: skip


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One of `karhunen serve`."""

    def __init__(self, model: Path, codec: Path, store: str, log: Path, *others: str) -> None:
        self.port, self.log = free_port(), log
        command = [sys.executable, "-m", "karhunen", "serve", str(model), "--codec", str(codec), "--store", store]
        environment = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [*command, *others, "--port", str(self.port), *ENGINE],
                stdout=subprocess.DEVNULL, stderr=stream, env=environment, start_new_session=True,
            )  # fmt: skip
        for _ in range(START_SECONDS * 2):
            assert self.process.poll() is None, f"the server did not start; see {log}"
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not answer in {START_SECONDS} s; see {log}")

    def get(self, path: str) -> str:
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def ask(self, prompt: str, n: int = 8) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=300) as answer:
            return dict(json.loads(answer.read()))

    def metric(self, name: str) -> float:
        """Summed over labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"{name}{{")]
        assert lines, f"{name} is not on /metrics"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def kill(self) -> None:
        """At once, with all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def served(*arguments: Any) -> Iterator[Server]:
    server = Server(*arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(folder, model, codec)."""
    root = tmp_path_factory.mktemp("served")
    model = save("llama", root / "model")
    return root, model, calibrated(model, root / "codec")


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def wait_for_pages(address: str, n: int) -> list[str]:
    store = open_store(address)
    for _ in range(600):
        if len(keys := list(store.keys())) >= n:
            return keys
        time.sleep(0.1)
    raise AssertionError(f"{n} pages were not stored in a minute")


def test_a_server_answers_from_its_store_and_shows_it(made: tuple[Path, Path, Path]) -> None:
    """Then a full disk: answers go on, and the series says why nothing is stored. Then it is killed while it writes."""
    root, model, codec = made
    store, prompt = root / "pages", words(N_TOKENS, 1)
    log = root / "first.log"
    with served(model, codec, str(store), log) as server:
        assert f"karhunen serve: {model} at http://127.0.0.1:{server.port}" in log.read_text()
        first = server.ask(prompt)
        wait_for_pages(str(store), N_PAGES)
        assert text(server.ask(prompt)) == text(first)
        assert server.metric("vllm:external_prefix_cache_hits_total") == RESTORED * 128
        assert server.metric("vllm:karhunen_pages_loaded_total") == RESTORED
        assert server.metric("vllm:karhunen_pages_saved_total") == N_PAGES
        assert server.metric("vllm:karhunen_bytes_saved_total") > 0
        assert server.metric("vllm:karhunen_encode_seconds_count") >= 1
        assert server.metric("vllm:karhunen_decode_seconds_count") == 1
        assert server.metric("vllm:karhunen_refusals_total") == 0

        shutil.move(store / ".work", root / "work")  # writing fails from now on, as on a full disk
        (store / ".work").write_text("in the way")
        full = server.ask(words(N_TOKENS, 2))
        for _ in range(100):  # what is coded beside is told with a later step
            time.sleep(0.2)
            assert text(server.ask(words(N_TOKENS, 2))) == text(full)
            if server.metric("vllm:karhunen_store_failures_total"):
                break
        assert server.metric("vllm:karhunen_store_failures_total") >= N_PAGES
        assert server.metric("vllm:karhunen_pages_saved_total") == N_PAGES
        (store / ".work").unlink()
        shutil.move(root / "work", store / ".work")

        for seed in range(3, 9):
            server.ask(words(N_TOKENS, seed), n=1)
        server.kill()
    for key in list(open_store(str(store)).keys()):
        read(open_store(str(store)).get(key) or b"")  # every page that is there is whole


def test_the_next_server_goes_on_from_the_killed_ones_store(made: tuple[Path, Path, Path]) -> None:
    """A page damaged meanwhile is refused and read again; a second server shares the store."""
    root, model, codec = made
    store, prompt = open_store(str(root / "pages")), words(N_TOKENS, 1)
    with served(model, codec, str(root / "pages"), root / "second.log") as server:
        answer = server.ask(prompt)
        assert server.metric("vllm:karhunen_pages_loaded_total") == RESTORED
        for key in list(store.keys()):
            page = bytearray(store.get(key) or b"")
            page[len(page) // 2] ^= 1
            store.put(key, bytes(page))
        assert text(server.ask(prompt)) == text(answer)
        server.ask("t3 t4", n=1)
        assert server.metric("vllm:karhunen_refusals_total") == 1
        assert server.metric("vllm:karhunen_load_failures_total") == 1


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Any]:
    """Starts a Redis server on one port, again and again; skips, saying so, where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on this machine")
    port, running = free_port(), []

    def start() -> tuple[str, subprocess.Popen[bytes]]:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
        running.append(subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(1.0)
        return f"redis://127.0.0.1:{port}/0", running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_redis_is_killed_and_started_again(made: tuple[Path, Path, Path], redis: Any) -> None:
    """A prefill server fills it and a decode server answers from it, before and after."""
    root, model, codec = made
    address, process = redis()
    with served(model, codec, address, root / "redis.log") as server:
        first = server.ask(words(N_TOKENS, 1))
        wait_for_pages(address, N_PAGES)
        assert text(server.ask(words(N_TOKENS, 1))) == text(first)
        assert server.metric("vllm:karhunen_pages_loaded_total") == RESTORED
        process.kill()
        process.wait()
        start = time.perf_counter()
        assert text(server.ask(words(N_TOKENS, 1))) == text(first)
        assert time.perf_counter() - start < 30
        redis()
        server.ask(words(N_TOKENS, 1))
        wait_for_pages(address, N_PAGES)
        assert text(server.ask(words(N_TOKENS, 1))) == text(first)
        assert server.metric("vllm:karhunen_pages_loaded_total") == 2 * RESTORED
