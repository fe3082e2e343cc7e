"""A small cache that was watched while it was filled."""

from typing import Any

import torch
from tests.hf.tiny import build
from tests.synthetic import quick

from karhunen.calibration.calibrate import calibrate
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument
from karhunen.monitoring.exporter import CacheCollector
from karhunen.recipes import make

N_TOKENS, N_CODED = 100, 72  # 3 sinks and 20 newest exact, pages of 8


def filled(model: Any, n_tokens: int, collector: CacheCollector | None = None) -> CompressedCache:
    recipe = quick(make("int2:group=12"))
    tokens = torch.arange(600) % 90 + 3
    cache = CompressedCache(model, fit(recipe, calibrate(model, tokens, recipe.needs())))
    if collector is not None:
        collector.watch(cache)
    with torch.no_grad():
        model(input_ids=tokens[None, :n_tokens], use_cache=True, **{cache_argument(model): cache})
    return cache


def watched(collector: CacheCollector) -> CompressedCache:
    return filled(build("llama"), N_TOKENS, collector)
