"""Long use on a tiny model: so many decode steps of one cache, so many sessions on one codec at a time.

    python -m benchmarks.soak                          # 20,000 steps, 50 sessions: minutes
    python -m benchmarks.soak --steps 2000 --sessions 10

What has to hold: the bytes are those of coding all tokens at once, bit for bit; memory grows by the bytes of a coded
token and by nothing else; when sessions end, all they held is gone. Exit code 1 if any of it does not hold.
"""

import argparse
import gc
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tests.hf.tiny import build
from torch import Tensor

import karhunen
from karhunen import recipes
from karhunen.calibration.calibrate import calibrate
from karhunen.codec import Codec
from karhunen.evaluation.results.provenance import provenance
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument
from karhunen.monitoring.allocator import keep_freed_memory
from karhunen.store.layer_store import LayerStore

RECIPE = "karhunen:bits=2,block_tokens=16,sink=4,recent=32"
N_SESSION_STEPS = 60
N_PROMPT = 50
SPARE_BYTES = 16 << 20
"""Of the process, beside what caches hold: the room of buffers that grow by doubling, and the allocator's own."""


def main() -> int:
    """Both parts, and what they found."""
    reading = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reading.add_argument("--steps", type=int, default=20_000)
    reading.add_argument("--sessions", type=int, default=50)
    given = reading.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    keep_freed_memory()
    model = build("llama", num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=1 << 17)
    codec = fit(recipes.make(RECIPE), calibrate(model, tokens(4, 512), recipes.make(RECIPE).needs()))
    karhunen.enable(model)
    wrong = [*steps(model, codec, given.steps), *sessions(model, codec, given.sessions)]
    where = provenance()
    print(f"commit {where.commit[:10]}, {where.machine}, torch {torch.__version__}, Python {platform.python_version()}")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


def steps(model: Any, codec: Codec, n_steps: int) -> list[str]:
    """One token at a time; what does not hold."""
    cache, seen = CompressedCache(model, codec), list[tuple[Tensor, Tensor]]()
    plain = cache.layers[0].update

    def update(key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        seen.append((key.clone(), value.clone()))
        return plain(key, value, *rest, **named)

    cache.layers[0].update = update
    text, start, wrong, first, began = tokens(1, N_PROMPT, 5), time.perf_counter(), list[str](), None, 0
    run(model, cache, text)
    for n in range(1, n_steps + 1):
        logits = run(model, cache, text[:, n % N_PROMPT : n % N_PROMPT + 1])
        if n % max(1, n_steps // 10) == 0:
            held, process = cache.report().total.held, resident_bytes()
            kept = sum(x.nbytes + y.nbytes for x, y in seen)  # by this script
            first = first or process - held - kept
            began = began or n
            print(f"step {n:,}: {held:,} bytes held, {process / 1e6:.1f} MB in the process", flush=True)
            if process - held - kept - first > SPARE_BYTES:
                wrong.append(f"since step {began:,} the process grew by {process - held - kept - first:,} bytes more")
        if not bool(logits.isfinite().all()):
            wrong.append(f"step {n}: logits of NaN or infinity")
            break
    at_once = LayerStore(codec.layers[0], codec.window)
    key, value = (torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))
    at_once.append(key, value)
    mine = cache.layers[0].store
    if (differing := _differing(mine, at_once)) or mine.n_coded < 0.9 * n_steps:
        wrong.append(f"{differing or 'too few tokens coded'}: {mine.n_coded:,} of {mine.n_tokens:,} tokens coded")
    seconds = time.perf_counter() - start
    print(
        f"{n_steps:,} steps: {mine.n_coded:,} tokens coded, bytes as of all at once: {not differing}; {seconds:.0f} s"
    )
    cache.close()
    return wrong


def sessions(model: Any, codec: Codec, n_sessions: int) -> list[str]:
    """All open at once and in turns; what does not hold."""
    alone = [_session(model, codec, seed) for seed in range(0, n_sessions, max(1, n_sessions // 5))]
    gc.collect()
    before, n_before, wrong = resident_bytes(), n_tensors(), list[str]()
    open_now = [CompressedCache(model, codec) for _ in range(n_sessions)]
    for seed, cache in enumerate(open_now):
        run(model, cache, tokens(1, N_PROMPT, seed))
    for n in range(N_SESSION_STEPS):
        for seed, cache in enumerate(open_now):
            run(model, cache, tokens(1, 1, 1000 * seed + n))
    for expected, seed in zip(alone, range(0, n_sessions, max(1, n_sessions // 5)), strict=True):
        if differing := _differing(open_now[seed].layers[0].store, expected):
            wrong.append(f"session {seed}: {differing} are not those of a session alone")
    held = sum(cache.report().total.held for cache in open_now)
    most = resident_bytes()
    for cache in open_now:
        cache.close()
    del cache
    open_now.clear()
    gc.collect()
    after, n_after = resident_bytes(), n_tensors()
    print(
        f"{n_sessions} sessions of {N_PROMPT + N_SESSION_STEPS} tokens at once: {held:,} bytes held, process "
        f"{before / 1e6:.1f} MB before, {most / 1e6:.1f} MB with them, {after / 1e6:.1f} MB after; tensors "
        f"{n_before} before, {n_after} after"
    )
    if n_after > n_before or after - before > SPARE_BYTES:
        wrong.append(f"{n_after - n_before} tensors and {after - before:,} bytes stayed behind")
    return wrong


def _session(model: Any, codec: Codec, seed: int) -> LayerStore:
    cache = CompressedCache(model, codec)
    run(model, cache, tokens(1, N_PROMPT, seed))
    for n in range(N_SESSION_STEPS):
        run(model, cache, tokens(1, 1, 1000 * seed + n))
    cache.close()
    return cache.layers[0].store


def run(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits of one forward."""
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}).logits


def tokens(b: int, t: int, seed: int = 0) -> Tensor:
    """Of the tiny vocabulary."""
    return torch.randint(3, 99, (b, t), generator=torch.Generator().manual_seed(seed))


def resident_bytes() -> int:
    """Memory of this process, as the system counts it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def n_tensors() -> int:
    """Tensors that Python can reach."""
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def _differing(mine: LayerStore, theirs: LayerStore) -> str:
    a, b = (_contents(store) for store in (mine, theirs))
    names = [
        name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]
    return ", ".join(sorted(names))


def _contents(store: LayerStore) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for slot in ("key", "value"):
        found[f"{slot}s at the start"], found[f"recent {slot}s"] = store.exact(slot)
        if (packed := store.packed(slot)) is not None:
            found[f"planes of {slot}s"] = packed.planes
            found |= {f"{name} of {slot}s": x for name, x in packed.side.items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
