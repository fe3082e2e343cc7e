"""The one softmax against its formula, number by number."""

import math

import torch
from tests.closeness import assert_near
from tests.synthetic import seeded
from torch import Tensor

from karhunen.kernels.softmax import (
    attended,
    attention_weights,
    capped,
    causal,
    log_attention_weights,
    merge_partials,
    with_sinks,
)

ROUNDING = 1e-12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def test_a_cap_bends_scores_and_none_leaves_them() -> None:
    scores = normal(2, 5) * 40
    assert capped(scores, None) is scores
    wanted = torch.tensor([[30 * math.tanh(x / 30) for x in row] for row in scores.tolist()], dtype=torch.float64)
    assert_near(capped(scores, 30.0), wanted, ROUNDING)


def test_a_token_sees_itself_and_earlier_ones_of_its_window() -> None:
    rows, columns = torch.tensor([3, 5]), torch.arange(7)
    assert causal(rows, columns).tolist() == [[n <= m for n in range(7)] for m in (3, 5)]
    assert causal(rows, columns, 2).tolist() == [[m - 2 < n <= m for n in range(7)] for m in (3, 5)]


def test_weights_share_with_sinks() -> None:
    scores, sinks = normal(2, 3, 4), normal(2, seed=1)
    for found, own in ((attention_weights(scores), None), (attention_weights(scores, sinks[:, None]), sinks)):
        for i in range(2):
            for row, weights in zip(scores[i].tolist(), found[i].tolist(), strict=True):
                total = sum(map(math.exp, row)) + (0.0 if own is None else math.exp(float(own[i])))
                assert all(math.isclose(w, math.exp(s) / total) for w, s in zip(weights, row, strict=True))
    assert_near(
        log_attention_weights(scores, sinks[:, None]).exp(), attention_weights(scores, sinks[:, None]), ROUNDING
    )


def test_parts_merge_to_attention_to_all_tokens() -> None:
    scores, values, sinks = normal(2, 3, 30), normal(2, 30, 5, seed=1), normal(2, seed=2)[:, None]
    parts = [attended(scores[..., s], values[:, s]) for s in (slice(0, 7), slice(7, 30))]
    merged = merge_partials(parts)
    assert_near(merged.mean, attention_weights(scores) @ values, ROUNDING)
    assert_near(merged.log_sum, scores.exp().sum(-1).log(), ROUNDING)
    shared = with_sinks(merged, sinks)
    assert_near(shared.mean, attention_weights(scores, sinks) @ values, ROUNDING)
    assert_near(shared.log_sum, (scores.exp().sum(-1) + sinks.exp()).log(), ROUNDING)
    assert with_sinks(merged, None) is merged


def test_a_row_that_sees_nothing_gives_nothing() -> None:
    scores, values = normal(2, 6), normal(6, 3, seed=1)
    scores[1] = -torch.inf
    part = attended(scores, values)
    assert part.mean[1].tolist() == [0, 0, 0]
    assert part.log_sum[1] == -torch.inf
    both = merge_partials([part, attended(scores[:1].expand(2, -1), values)])
    assert_near(both.mean[1], attention_weights(scores[0]) @ values, ROUNDING)
    assert merge_partials([attended(scores[1:], values)] * 2).mean.eq(0).all()
