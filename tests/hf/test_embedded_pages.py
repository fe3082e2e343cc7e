"""Pages, sessions and prefixes of a real model: SmolLM2 goes on where it stopped, and reads a beginning once."""

from pathlib import Path

import pytest
import torch

from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.describe import identity_of
from karhunen.hf.embedded import load
from karhunen.hf.prefix_cache import PrefixCache
from karhunen.hf.probe import forward, inference
from karhunen.recipes import make
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.stores import DirectoryStore


@pytest.mark.model
def test_smollm2_resumes_bit_for_bit_and_restores_a_prefix(tmp_path: Path) -> None:
    model, tokenizer = load("smollm2")
    identity = identity_of(model)
    codec = fit(make("int4", recent=32), Statistics(identity, {i: LayerStatistics() for i in range(30)}))
    text = "The quick brown fox jumps over the lazy dog. " * 30 + "The quick brown"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with inference(model):
        held = CompressedCache(model, codec)
        forward(model, held, ids[:, :-3])
        held.save(tmp_path / "session")
        restored = CompressedCache.load(model, tmp_path / "session")
        want, got = (forward(model, cache, ids[:, -3:]).logits for cache in (held, restored))
    assert torch.equal(want, got)
    assert "fox" in tokenizer.decode(got[0, -1].argmax())

    prefix = PrefixCache(model, codec, DirectoryStore(tmp_path / "pages"), tokenizer, page_tokens=64)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    first, second = (prefix.generate(ids, **settings) for _ in range(2))
    assert torch.equal(first, second)
    assert prefix.last is not None
    assert prefix.last.n_restored == (ids.shape[1] - 1) // 64 * 64 > 200
    assert prefix.store.counts.refusals == prefix.store.counts.failures == 0
    dense = ids.shape[1] // 64 * 64 * 30 * 2 * 3 * 64 * 2  # in bfloat16
    assert prefix.store.counts.bytes_written < dense / 2.5
