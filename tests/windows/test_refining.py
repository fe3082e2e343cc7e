"""Who gets how many layers: water-filling over tokens, by hand."""

import math

import pytest
import torch
from tests.synthetic import seeded

from karhunen.recipes import make
from karhunen.windows.refining import STEPS, Refining
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.streaming import Streaming

RULE = Refining(SinkRecent(), n_layers=3, mean_layers=1.5)
NONE = torch.zeros(1, dtype=torch.int64)


def test_four_times_the_squared_weight_is_one_layer_of_one_bit_more() -> None:
    """½ log₂ 4 = 1: of six layers for four tokens the hottest gets three, the next two, one, none."""
    heat = RULE.heat(torch.tensor([[1.0, 16.0, 64.0, 4.0]]), 0, NONE)
    assert RULE.classes(heat).tolist() == [[0, 2, 3, 1]]
    assert RULE.classes(heat, STEPS).tolist() == [[0, 1, 2, 0]]  # the line has risen by a layer
    assert RULE.classes(heat, 255).tolist() == [[0, 0, 0, 0]]


def test_the_coldest_loses_its_layer_first() -> None:
    heat = RULE.heat(torch.tensor([[1.0, 1.5, 2.0, 3.0]]), 0, NONE)
    classes = [RULE.classes(heat, line).tolist()[0] for line in range(2 * STEPS)]
    total = [sum(row) for row in classes]
    assert total == sorted(total, reverse=True)
    assert all(row == sorted(row) for row in classes)
    assert len({tuple(row) for row in classes}) >= 6


@pytest.mark.parametrize("mean", [0.3, 0.42, 1.0, 2.7])
def test_after_every_group_the_budget_is_met_to_a_layer(mean: float) -> None:
    rule = Refining(SinkRecent(), n_layers=3, mean_layers=mean)
    scores = torch.rand(1, 160, generator=seeded(1)) ** 8
    given = torch.zeros(1, dtype=torch.int64)
    for start, stop in ((0, 96), (96, 112), (112, 128), (128, 144), (144, 160)):
        given += rule.classes(rule.heat(scores[:, start:stop], start, given)).sum(1)
        assert int(given) == round(mean * stop)


def test_tokens_without_a_score_get_nothing_and_rows_are_decided_alone() -> None:
    scores = torch.tensor([[1.0, math.nan, 4.0, 9.0], [0.0, 0.0, 0.0, 1.0]])
    heat = RULE.heat(scores, 0, torch.tensor([0, 0]))
    classes = RULE.classes(heat)
    assert int(classes[0, 1]) == 0
    assert classes.sum(1).tolist() == [6, 6]
    assert torch.equal(heat[1:], RULE.heat(scores[1:], 0, NONE))


def test_what_cannot_be_refined_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="drops tokens"):
        Refining(Streaming(), 3, 1.0)
    with pytest.raises(ValueError, match="mean of 4"):
        Refining(SinkRecent(), 3, 4.0)
    with pytest.raises(ValueError, match=r"use more than 1 and at most 4"):
        make("karhunen:progressive=true,bits=1")
    with pytest.raises(ValueError, match="progressive tokens differ in size"):
        make("karhunen:progressive=true,token_bytes=4000")
