"""What a prompt loses that comes back from pages."""

import pytest
import torch
from tests.hf.test_cache import fitted, model_of, tokens

from karhunen.evaluation.scores.restored import score_restored
from karhunen.evaluation.scores.score import Document, run_dense


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_exact_pages_lose_nothing_and_coarse_ones_more_than_fine_ones(family: str) -> None:
    model = model_of(family)
    dense = run_dense(model, Document("random", tokens(1, 80)[0], 64))
    kl = {
        name: float(score_restored(model, fitted(family, name), dense)[0].mean()) for name in ("full", "int8", "int2")
    }
    assert kl["full"] == 0
    assert 0 < kl["int8"] < kl["int2"]
    assert bool(score_restored(model, fitted(family, "full"), dense)[1].all())


def test_the_dense_run_is_left_as_it_was() -> None:
    model = model_of("llama")
    dense = run_dense(model, Document("random", tokens(1, 80)[0], 64))
    before = dense.cache.layers[0].keys.clone()
    score_restored(model, fitted("llama", "int2"), dense)
    assert torch.equal(dense.cache.layers[0].keys, before)
    short = run_dense(model, Document("short", tokens(1, 40)[0], 20))
    with pytest.raises(ValueError, match="makes no page"):
        score_restored(model, fitted("llama", "kivi"), short)
