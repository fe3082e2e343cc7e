"""The scorer is itself measured: on caches whose score is known beforehand."""

from typing import Any

import pytest
import torch
from tests.evaluation.conftest import N_PREFILL, N_SCORED, codec_of, random_tokens

from karhunen.evaluation.scores.score import DenseRun, Document, Score, run_dense, score
from karhunen.hf.cache import CompressedLayer
from karhunen.statistics.gathered import Statistics


def scored(text: str, loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun) -> Score:
    return score(loaded[0], codec_of(text, statistics), dense)


def test_the_full_cache_has_no_divergence_and_agrees_everywhere(
    loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun
) -> None:
    full = scored("full", loaded, statistics, dense)
    assert torch.equal(full.kl, torch.zeros(N_SCORED))
    assert bool(full.agree.all())
    assert torch.equal(full.nll_coded, full.nll_dense)


def test_the_full_cache_has_no_divergence_when_the_prompt_is_read_in_chunks(
    loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun
) -> None:
    chunked = run_dense(loaded[0], dense.document, chunk_tokens=32)
    assert torch.equal(scored("full", loaded, statistics, chunked).kl, torch.zeros(N_SCORED))


def test_a_prompt_that_reads_its_own_coded_history_is_further_from_dense(
    loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun
) -> None:
    chunked = run_dense(loaded[0], dense.document, chunk_tokens=32)
    exact = scored("int2:group=4", loaded, statistics, dense).kl.mean()
    assert scored("int2:group=4", loaded, statistics, chunked).kl.mean() > exact


def test_error_falls_with_bits(loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun) -> None:
    kl = [float(scored(f"int{bits}:group=12", loaded, statistics, dense).kl.mean()) for bits in (8, 4, 2)]
    assert 0 < 10 * kl[0] < kl[1] < kl[2] / 3


def test_garbage_is_caught(
    loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = scored("int8:group=12", loaded, statistics, dense)
    plain = CompressedLayer.update

    def shuffled(self: CompressedLayer, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
        all_keys, all_values = plain(self, key, value, *rest, **more)
        return all_keys.flip(2), all_values

    monkeypatch.setattr(CompressedLayer, "update", shuffled)
    garbage = scored("int8:group=12", loaded, statistics, dense)
    assert garbage.kl.mean() > 100 * sound.kl.mean()
    assert garbage.kl.mean() > 0.1
    assert garbage.agree.double().mean() < 0.9


def test_a_codec_that_codes_nothing_is_one_times_smaller(
    loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun
) -> None:
    report = scored("full", loaded, statistics, dense).report
    assert report.total.ratio == 1.0
    assert report.total.coded_ratio == 1.0
    assert all(layer.n_coded == 0 and layer.reason for layer in report.layers)


def test_tokens_in_the_exact_window_are_not_counted_as_coded(
    loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun
) -> None:
    report = scored("int4:group=12", loaded, statistics, dense).report
    n = N_PREFILL + N_SCORED
    for layer in report.layers:
        assert layer.n_tokens == n
        assert layer.n_coded == (n - 4 - 16) // 16 * 16
        n_exact = n - layer.n_coded
        assert layer.account.exact == n_exact * 2 * 2 * 12 * 4, "sides, heads, head size, float32"
    assert report.total.coded_bits_per_element == pytest.approx(4 + 32 / 12)


def test_a_text_within_the_window_is_exact(loaded: tuple[Any, Any], statistics: Statistics) -> None:
    short = run_dense(loaded[0], Document("short", random_tokens(20, 3), 4))
    result = scored("int2:group=4", loaded, statistics, short)
    assert torch.equal(result.kl, torch.zeros(16))
    assert result.report.total.ratio == 1.0
    assert result.report.total.coded_bits_per_element == 0


@pytest.mark.parametrize(
    "text", ["streaming_llm:kept=16", "key_norm:kept=0.3", "snapkv:kept=16,recent=8", "h2o:kept=0.4"]
)
def test_a_window_that_drops_tokens_is_scored_on_what_it_holds(
    text: str, loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun
) -> None:
    found = scored(text, loaded, statistics, dense)
    assert found.report.total.ratio > 1.3
    assert found.kl.mean() > 1e-4


def test_a_prompt_within_the_budget_is_scored_as_dense(
    loaded: tuple[Any, Any], statistics: Statistics, dense: DenseRun
) -> None:
    """The prompt is read by the cache itself, through an attention that shows its queries: nothing else may change."""
    assert float(scored("snapkv", loaded, statistics, dense).kl.max()) < 1e-6
