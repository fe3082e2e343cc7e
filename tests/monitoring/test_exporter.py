"""What Prometheus scrapes is what the caches' own reports say, and a cache that is not watched pays nothing."""

import gc
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.hf.tiny import build
from tests.synthetic import quick

from karhunen.calibration.calibrate import calibrate
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument
from karhunen.monitoring.exporter import CacheCollector, serve
from karhunen.recipes import make

SOURCE = Path(__file__).parents[2] / "src"


def filled(model: Any, n_tokens: int) -> CompressedCache:
    recipe = quick(make("int8:group=12"))
    tokens = torch.arange(600) % 90 + 3
    cache = CompressedCache(model, fit(recipe, calibrate(model, tokens, recipe.needs())))
    with torch.no_grad():
        model(input_ids=tokens[None, :n_tokens], use_cache=True, **{cache_argument(model): cache})
    return cache


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {"".join([sample.name, *sample.labels.values()]): sample.value for f in families for sample in f.samples}


def test_what_is_scraped_is_what_two_caches_hold_until_one_is_gone() -> None:
    model = build("llama")
    one, two = filled(model, 100), filled(model, 60)
    collector = CacheCollector(limit_bytes=10**6)
    collector.watch(one)
    collector.watch(two)
    port = serve(collector, 0)
    said, totals = scraped(port), [cache.report().total for cache in (one, two)]
    for kind in ("codes", "side", "exact"):
        assert said[f"karhunen_cache_bytes{kind}"] == sum(getattr(total, kind) for total in totals)
    assert said["karhunen_cache_bytescodes"] > 0
    dense = 2 * 2 * 2 * 12 * 4 * 160  # layers, sides, heads, head size, float32, tokens
    assert said["karhunen_cache_dense_bytes"] == dense
    assert said["karhunen_cache_ratio"] == pytest.approx(dense / sum(total.held for total in totals))
    assert said["karhunen_cache_usage_ratio"] == pytest.approx(sum(total.held for total in totals) / 10**6)
    assert said["karhunen_cache_tokens"] == 160
    assert said["karhunen_cache_coded_tokens"] == 72 + 32  # 3 sinks and 20 newest exact, pages of 8
    assert said["karhunen_cache_caches"] == 2
    del two
    gc.collect()
    again = scraped(port)
    assert again["karhunen_cache_caches"] == 1
    assert again["karhunen_cache_tokens"] == 100
    assert again["karhunen_cache_scrapes_total"] == said["karhunen_cache_scrapes_total"] + 1


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no cache"):
        CacheCollector(limit_bytes=0)


def test_the_exporter_is_loaded_by_nobody_who_does_not_ask_for_it() -> None:
    code = "import sys, karhunen.hf.cache, karhunen.hf.session; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False).returncode == 0
