import math

import pytest
import torch

from karhunen.evaluation.scores.metrics import interval, percentile, perplexity, rouge_l, tokens_until_divergence


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_constant_has_an_interval_of_no_width() -> None:
    found = interval([torch.full((100,), 0.25)] * 3)
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)


def test_the_interval_covers_the_truth_nineteen_times_in_twenty() -> None:
    inside = 0
    for seed in range(200):
        draws = [torch.randn(320, generator=seeded(1000 * seed + i)) for i in range(3)]
        inside += not interval(draws).excludes(0.0)
    assert 0.87 <= inside / 200 <= 0.99  # thirty blocks: slightly narrow, as a percentile bootstrap is


def test_neighbours_that_share_their_error_widen_the_interval() -> None:
    shared = torch.randn(60, generator=seeded(0)).repeat_interleave(16)
    alone = torch.randn(960, generator=seeded(0))
    wide, narrow = interval([shared]), interval([alone])
    assert (wide.high - wide.low) > 2.5 * (narrow.high - narrow.low)


def test_many_documents_are_resampled_whole() -> None:
    documents = [torch.full((8,), float(i)) for i in range(24)]
    assert interval(documents).unit == "documents"
    assert interval(documents[:4]).unit == "blocks of 32 tokens"


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no scored token"):
        interval([torch.empty(0)])


def test_perplexity_of_a_coin_is_two() -> None:
    assert perplexity([torch.full((10,), math.log(2))]) == pytest.approx(2)


def test_the_ninety_ninth_percentile_leaves_one_in_a_hundred() -> None:
    assert percentile([torch.arange(101.0)], 0.99) == 99


def test_rouge_l_counts_the_longest_common_subsequence() -> None:
    assert rouge_l([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert rouge_l([1, 2, 3, 4], [5, 6]) == 0
    assert rouge_l([1, 2, 3, 4], [1, 9, 3]) == pytest.approx(2 * 2 / 7)  # 1 and 3
    assert rouge_l([], []) == 1


def test_divergence_is_the_first_token_that_differs() -> None:
    assert tokens_until_divergence([1, 2, 3], [1, 2, 4]) == 2
    assert tokens_until_divergence([1, 2, 3], [1, 2]) == 2
    assert tokens_until_divergence([1], [2]) == 0
