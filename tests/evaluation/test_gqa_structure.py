"""The transform of the pooled queries is the one to have when several query heads read one key head."""

import pytest
import torch
from tests.synthetic import seeded
from torch import Tensor

from karhunen.evaluation.scores.gqa_structure import axes_of, distortion, structures

H, Q, D = 2, 3, 8


def definite(*shape: int, seed: int, spread: float = 1.5) -> Tensor:
    x = torch.randn(*shape, D, 40, generator=seeded(seed)).double() * torch.logspace(0, -spread, D).double()[:, None]
    turn = torch.linalg.qr(torch.randn(*shape, D, D, generator=seeded(seed + 1)).double())[0]
    return turn @ (x @ x.mT / 40) @ turn.mT


def test_a_transform_of_the_readers_own_metric_reaches_the_bound() -> None:
    """Where no coefficient falls below the water line, D = d · det(M Σ)^{1/d} · 2^{−2R}."""
    covariance, metric = definite(seed=1, spread=0.3), definite(seed=5, spread=0.3)
    found = distortion(covariance, axes_of(covariance, metric), metric, 6.0)
    bound = D * float((metric @ covariance).det()) ** (1 / D) * 2**-12
    assert found == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("bits", [2.0, 4.0])
def test_pooled_queries_per_kv_head_are_the_best_structure(bits: float) -> None:
    found = structures(definite(H, seed=1), definite(H, Q, seed=9), bits)
    assert min(found, key=lambda name: found[name]) == "per KV head"
    assert found["per KV head"] < found["plain"]


def test_heads_that_are_alike_may_share_their_transform() -> None:
    covariance, metrics = definite(1, seed=1).expand(H, D, D), definite(1, Q, seed=9).expand(H, Q, D, D)
    found = structures(covariance, metrics, 3.0)
    assert found["per layer"] == pytest.approx(found["per KV head"], rel=1e-6)


def test_copies_for_each_query_head_pay_for_their_bytes() -> None:
    """Even where query heads differ as much as they can, a third of the bits costs more than the better axes give."""
    found = structures(definite(H, seed=1), definite(H, Q, seed=9), 6.0)
    assert found["per query head"] > 10 * found["per KV head"]
