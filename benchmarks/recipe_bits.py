"""Bits per element of every recipe at its default options, from bytes that exist; `karhunen recipes` shows them.

    python -m benchmarks.recipe_bits          # writes src/karhunen/evaluation/results/recipe_bits.json

Synthetic vectors: one layer of 2 KV heads of size 64, 2,048 tokens in bfloat16, drawn at random with a spectrum that
falls by two decades, appended to a real store; codebooks are trained in one iteration, on which no byte depends. Only
the lengths of deflated pages (kvtc) and which tokens are exact by their norm (karhunen, ott, rotatekv) depend on the
vectors.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tests.synthetic import _untrained, cached, statistics

from karhunen.evaluation.results.provenance import provenance
from karhunen.fitting import fit
from karhunen.recipes import make, names
from karhunen.statistics.identity import LayerShape
from karhunen.store.layer_store import LayerStore
from karhunen.windows.score import Queries

FILE = Path(__file__).parent.parent / "src" / "karhunen" / "evaluation" / "results" / "recipe_bits.json"
SHAPE = LayerShape("full", n_kv_heads=2, n_query_heads=4, key_dim=64, value_dim=64)
N_TOKENS = 2048


def measured(name: str) -> dict[str, float]:
    recipe = make(name)
    if recipe.key is not None and recipe.value is not None:
        recipe = replace(recipe, key=_untrained(recipe.key), value=_untrained(recipe.value))
    codec = fit(recipe, statistics(recipe, SHAPE))
    key, value = (x.bfloat16() for x in cached(SHAPE, 1, N_TOKENS))
    queries = None if recipe.window.reads == "never" else Queries(key.repeat_interleave(2, dim=1), 0.125)
    store = LayerStore(codec.layers.get(0), codec.window)
    store.append(key, value, queries=queries)
    account = store.account()
    return {"all": round(account.bits_per_element, 4), "coded": round(account.coded_bits_per_element, 4)}


def main() -> None:
    what = " ".join((__doc__ or "").split("\n\n")[2].split())
    body = {
        "what": what,
        "n_tokens": N_TOKENS,
        "bits": {n: measured(n) for n in names()},
        "provenance": asdict(provenance()),
    }
    FILE.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
