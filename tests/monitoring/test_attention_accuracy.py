"""`attention_accuracy_delta`: the formula, written out, and what is known of it beforehand."""

import math

import pytest
import torch
from torch import Tensor

from karhunen.monitoring.attention_accuracy import attention, attention_accuracy_delta, standing_in

H, T, D, E = 2, 20, 8, 6
SUM = 1e-5  # of float32 sums of some hundred terms


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERIES, KEYS, VALUES = drawn(H, 3, D, seed=0), drawn(H, T, D, seed=1), drawn(H, T, E, seed=2)
SEEN = torch.tensor([1, 7, T])
PAIR = (KEYS, VALUES)


def output(head: int, query: int, keys: Tensor, values: Tensor, scale: float) -> list[float]:
    """Of one query, number by number."""
    seen = range(int(SEEN[query]))
    scores = [scale * sum(float(QUERIES[head, query, i] * keys[head, t, i]) for i in range(D)) for t in seen]
    weights = [math.exp(score) for score in scores]
    return [sum(w * float(values[head, t, e]) for w, t in zip(weights, seen, strict=True)) / sum(weights)
            for e in range(E)]  # fmt: skip


@pytest.mark.parametrize("scale", [None, 0.7])
def test_it_is_the_formula(scale: float | None) -> None:
    moved = (KEYS + 0.1 * drawn(H, T, D, seed=3), VALUES + 0.1 * drawn(H, T, E, seed=4))
    above = below = 0.0
    for head in range(H):
        for query in range(3):
            one = output(head, query, KEYS, VALUES, scale or D**-0.5)
            other = output(head, query, *moved, scale or D**-0.5)
            above += sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
            below += sum(a**2 for a in one)
    assert attention_accuracy_delta(QUERIES, SEEN, PAIR, moved, scale) == pytest.approx(
        math.sqrt(above / below), rel=SUM
    )


def test_nothing_moves_where_nothing_changed() -> None:
    assert attention_accuracy_delta(QUERIES, SEEN, PAIR, (KEYS.clone(), VALUES.clone())) == 0.0


def test_values_that_are_a_tenth_too_large_move_it_by_a_tenth() -> None:
    assert attention_accuracy_delta(QUERIES, SEEN, PAIR, (KEYS, 1.1 * VALUES)) == pytest.approx(0.1, rel=1e-4)


def test_what_all_keys_have_in_common_moves_nothing() -> None:
    shifted = (KEYS + drawn(H, 1, D, seed=5), VALUES)
    assert attention_accuracy_delta(QUERIES, SEEN, PAIR, shifted) < 10 * SUM
    assert attention_accuracy_delta(QUERIES, SEEN, PAIR, (KEYS.flip(1), VALUES)) > 0.1


def test_tokens_that_no_query_sees_do_not_count() -> None:
    broken = (KEYS.clone(), VALUES.clone())
    for x in broken:
        x[:, 7:] = 1e6
    assert attention_accuracy_delta(QUERIES[:, :2], SEEN[:2], PAIR, broken) == 0.0


@pytest.mark.parametrize("n_seen", [[0], [T + 1], []])
def test_a_query_sees_tokens_that_are_there(n_seen: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        attention(QUERIES[:, : len(n_seen)], torch.tensor(n_seen, dtype=torch.int64), PAIR)


def test_later_keys_ask_those_before_them() -> None:
    queries, n_seen = standing_in(KEYS)
    assert torch.equal(queries, KEYS[:, T // 2 :]) and n_seen.tolist() == list(range(T // 2, T))
    with pytest.raises(ValueError, match="two or more"):
        standing_in(KEYS[:, :1])
