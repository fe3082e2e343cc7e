"""What watching costs: a decode step of a model with a meter on its cache, and without, in turn.

    two caches of one prompt, both read from their bytes ─▶ step, step, step, ... one of each in turn ─▶ mean and median

Tokens leave the window a page at a time, so a mean over whole pages counts what comparing them costs.

    python benchmarks/monitoring_cost.py --codec my-codec --tokens 2048 --json results/measured/monitoring-cost.json
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, cast

import torch

import karhunen
from karhunen.calibration.texts import evaluation_text
from karhunen.evaluation.adoption import PREFILL_TOKENS, first_tokens
from karhunen.evaluation.results.provenance import provenance
from karhunen.hf.embedded import load
from karhunen.hf.probe import cache_argument, inference
from karhunen.monitoring.meter import EVERY, LAYERS, Meter, moved_by, sampled
from karhunen.store.observer import Leaving

PAGE = 16


def main() -> None:
    """Time, print, write."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=8, help="of 16 steps each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calls-only", action="store_true", help="time the meter's calls, and load no model")
    given = parser.parse_args()
    codec = karhunen.Codec.from_pretrained(given.codec)
    calls = own_cost(codec, rounds=50)
    found: dict[str, Any] = {"meter_ms_a_step": {**calls, "all": sum(calls.values())}}
    if not given.calls_only:
        found |= steps(given, codec)
        found["share"] = found["meter_ms_a_step"]["all"] / found["median_ms"]["off"]
    print(json.dumps(found, indent=1))
    if given.json:
        made = {"made": asdict(provenance()), "model": given.model, "tokens": given.tokens}
        given.json.write_text(json.dumps({**made, **found}, indent=1))


def steps(given: Any, codec: Any) -> dict[str, Any]:
    """Of the model, with a meter and without."""
    model, tokenizer = load(given.model)
    karhunen.enable(model)
    tokens = first_tokens(tokenizer, evaluation_text(), given.tokens)
    caches = {name: karhunen.CompressedCache(model, codec) for name in ("off", "on")}
    meter = Meter()
    with inference(model):
        for cache in caches.values():
            read(model, cache, tokens)
        meter.watch(caches["on"])
        taken: dict[str, list[float]] = {name: [] for name in caches}
        for i in range(PAGE * (given.pages + 1)):
            for name in ("off", "on") if i % 2 else ("on", "off"):
                start = time.perf_counter()
                step(model, caches[name], i)
                taken[name].append(time.perf_counter() - start)
    taken = {name: seconds[PAGE:] for name, seconds in taken.items()}  # the first page loads kernels
    found: dict[str, Any] = {
        "mean_ms": {name: 1e3 * mean(seconds) for name, seconds in taken.items()},
        "median_ms": {name: 1e3 * median(seconds) for name, seconds in taken.items()},
        "compared_layers": sorted(meter.moved),
        "delta": {str(layer): moved.delta for layer, moved in sorted(meter.moved.items())},
        "asked": sorted({moved.asked for moved in meter.moved.values()}),
    }
    differences = sorted(on - off for on, off in zip(taken["on"], taken["off"], strict=True))
    found["median_difference_ms"] = 1e3 * median(differences)
    return found


def read(model: Any, cache: Any, tokens: torch.Tensor) -> None:
    """The prompt, in pieces."""
    for piece in tokens.split(PREFILL_TOKENS):
        model(input_ids=piece[None], use_cache=True, **{cache_argument(model): cache})


def step(model: Any, cache: Any, i: int) -> None:
    """One token."""
    model(input_ids=torch.tensor([[100 + i]]), use_cache=True, **{cache_argument(model): cache})


def own_cost(codec: Any, rounds: int) -> dict[str, float]:
    """Processor milliseconds of the meter's own calls on drawn vectors of the model's sizes, a step: queries of the
    sampled layers every step, counting in all layers once in 16, comparing in the sampled ones once in 16 · EVERY.

    Where other work shares the processor this says more than the difference of two steps.
    """
    found = {"queries": 0.0, "counting": 0.0, "comparing": 0.0}
    layers = sorted(codec.layers)
    for index in sampled(layers, LAYERS):
        shape, generator = codec.model.layers[index], torch.Generator().manual_seed(index)
        drawn = partial(torch.randn, generator=generator)
        key, value = drawn(1, shape.n_kv_heads, PAGE, shape.key_dim), drawn(1, shape.n_kv_heads, PAGE, shape.value_dim)
        recent = drawn(1, shape.n_kv_heads, 128, shape.key_dim)
        leaving = Leaving(codec.layers[index], key, value, torch.arange(PAGE)[None], None, recent, 0.0)
        query = drawn(1, shape.n_query_heads, 1, shape.key_dim)
        looking = look_at(Meter(every=10**9), index)
        looking.left(leaving)  # loads kernels, and compares once
        found["queries"] += each(partial(looking.asked, query, 0.125), rounds)
        found["counting"] += each(partial(looking.left, leaving), rounds) * len(layers) / LAYERS / PAGE
        queries = torch.cat(list(looking.queries), 1)
        found["comparing"] += each(partial(moved_by, leaving, queries, 0.125), rounds) / PAGE / EVERY
    return {name: 1e3 * seconds for name, seconds in found.items()}


def look_at(meter: Meter, index: int) -> Any:
    """What a meter puts on one layer."""
    layer = SimpleNamespace(store=SimpleNamespace(observers=()), on_query=None)
    cache = SimpleNamespace(
        codec=SimpleNamespace(windowed=(index,), layers={index: None}), coded_layers=lambda: [layer]
    )
    meter.watch(cast("Any", cache))
    return layer.store.observers[0]


def each(work: Callable[[], Any], rounds: int) -> float:
    """Median processor seconds."""
    taken: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return median(taken)


if __name__ == "__main__":
    main()
