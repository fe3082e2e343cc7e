"""What watching costs: a decode step of a model with a meter on its cache, and without, in turn.

    two caches of one prompt, both read from their bytes ─▶ step, step, step, ... one of each in turn ─▶ mean and median

Tokens leave the window a page at a time, so a mean over whole pages counts what comparing them costs.

    python benchmarks/monitoring_cost.py --codec my-codec --tokens 2048 --json results/measured/monitoring-cost.json
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import karhunen
from karhunen.calibration.texts import evaluation_text
from karhunen.evaluation.adoption import PREFILL_TOKENS, first_tokens
from karhunen.evaluation.provenance import provenance
from karhunen.hf.embedded import load
from karhunen.hf.probe import cache_argument, inference
from karhunen.monitoring.meter import Meter

PAGE = 16


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=8, help="of 16 steps each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    codec = karhunen.Codec.from_pretrained(given.codec)
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
    found = {
        "mean_ms": {name: 1e3 * mean(seconds) for name, seconds in taken.items()},
        "median_ms": {name: 1e3 * median(seconds) for name, seconds in taken.items()},
        "compared_layers": sorted(meter.moved),
        "delta": {str(layer): moved.delta for layer, moved in sorted(meter.moved.items())},
        "asked": sorted({moved.asked for moved in meter.moved.values()}),
    }
    differences = sorted(on - off for on, off in zip(taken["on"], taken["off"], strict=True))
    found["median_difference_ms"] = 1e3 * median(differences)
    found["meter_seconds_a_step_ms"] = 1e3 * own_cost(model, codec, tokens)
    found["share"] = found["meter_seconds_a_step_ms"] / found["median_ms"]["off"]
    print(json.dumps(found, indent=1))
    if given.json:
        made = {"made": asdict(provenance()), "model": given.model, "tokens": given.tokens}
        given.json.write_text(json.dumps({**made, **found}, indent=1))


def read(model: Any, cache: Any, tokens: torch.Tensor) -> None:
    """The prompt, in pieces."""
    for piece in tokens.split(PREFILL_TOKENS):
        model(input_ids=piece[None], use_cache=True, **{cache_argument(model): cache})


def step(model: Any, cache: Any, i: int) -> None:
    """One token."""
    model(input_ids=torch.tensor([[100 + i]]), use_cache=True, **{cache_argument(model): cache})


def own_cost(model: Any, codec: Any, tokens: torch.Tensor) -> float:
    """Seconds that the meter itself takes a step, by a clock around its own calls: where other work shares the
    processor, the difference of two steps says less than that."""
    meter, spent = Meter(), [0.0]
    cache = karhunen.CompressedCache(model, codec)
    read(model, cache, tokens[: len(tokens) // 2])
    meter.watch(cache)
    for layer in cache.coded_layers():
        layer.store.observers = tuple(Clocked(observer, spent) for observer in layer.store.observers)
        if layer.on_query is not None:
            layer.on_query = clocked(layer.on_query, spent)
    n = PAGE * 8  # every sampled layer is compared once in so many pages
    for i in range(n):
        step(model, cache, i)
    return spent[0] / n


class Clocked:
    """An observer whose time is taken."""

    def __init__(self, observer: Any, spent: list[float]) -> None:
        self.left = clocked(observer.left, spent)


def clocked(work: Any, spent: list[float]) -> Any:
    """The same, adding up."""

    def timed(*arguments: Any) -> None:
        start = time.process_time()
        work(*arguments)
        spent[0] += time.process_time() - start

    return timed


if __name__ == "__main__":
    main()
