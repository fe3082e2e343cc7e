"""Layers that read what another one has cached count with that layer: their queries, attention and output weights."""

from functools import cache
from typing import Any

import pytest
import torch
from tests.calibration.test_measure import assert_same, expected_queries, ids
from tests.hf.test_capture import own_attention
from tests.hf.tiny import build

from karhunen.calibration.calibrate import calibrate
from karhunen.hf.capture import Attention, Observation
from karhunen.hf.probe import inference
from karhunen.hf.queries import showing
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need

FAMILIES = ("gemma3n", "gemma4")  # layers 2 and 3 read what layers 0 and 1 have made
QUERIES = [Need("queries", "key", 8, weighting=w, skip_tokens=2) for w in ("uniform", "attention")]
NEEDS = (*QUERIES, Need("moments", "key", 8), Need("attended", "value"), Need("outputs", "value"),
         Need("output_gram", "value"))  # fmt: skip
N_TOKENS = 12


@cache
def model_of(family: str) -> Any:
    return build(family)


@cache
def measured(family: str, n_texts: int = 1) -> Statistics:
    texts = [ids(1, N_TOKENS, seed=seed)[0].tolist() for seed in range(n_texts)]
    return calibrate(model_of(family), texts, NEEDS, layers=(0, 1), min_tokens=8)


@cache
def read(family: str) -> dict[int, list[Observation]]:
    """Every attention call of the model, by the layer whose keys it reads; the one that made them first."""
    model, found = model_of(family), []

    def attend(attention: Attention, key: torch.Tensor, value: torch.Tensor, plain: Any) -> Any:
        index, at = int(attention.module.layer_idx), torch.arange(N_TOKENS)[None]
        owner = next((seen.layer for seen in found if torch.equal(seen.key, key)), index)
        found.append(Observation(owner, key, value, at, torch.ones_like(at).bool(), attention, reader=index))
        return plain()

    with inference(model), showing(model, attend):
        model(input_ids=ids(1, N_TOKENS, seed=0))
    return {layer: [seen for seen in found if seen.layer == layer] for layer in (0, 1)}


@pytest.mark.parametrize("need", QUERIES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_queries_of_every_reader_count(family: str, need: Need) -> None:
    """Spelled out over every query head of every layer that reads, and every pair of a row and a block."""
    for layer, calls in read(family).items():
        assert [seen.reader for seen in calls] == [layer, layer + 2]
        of_layer = measured(family).layers[layer]
        own, other = (expected_queries(seen, need, of_layer.key_rotary) for seen in calls)
        assert_same(of_layer.get(need, Moments), own + other)
        assert (other.outer.norm() / own.outer.norm()) > 0.1, "the reader's part is no rounding error"
        assert of_layer.n_tokens == N_TOKENS - 2, "a token is counted once"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_of_a_value_error_counts_every_reader(family: str) -> None:
    for layer, calls in read(family).items():
        found, value = measured(family).layers[layer], calls[0].value[0]
        h, e = value.shape[0], value.shape[-1]
        a = [own_attention(seen)[0].unflatten(0, (h, -1)) for seen in calls]  # [h q t t]
        received = sum(weights.square().sum((1, 2)) for weights in a) / N_TOKENS
        assert_same(found.get(Need("attended", "value"), Moments), Moments.of(value, received))
        outputs = torch.cat([(weights @ value[:, None]).flatten(1, 2) for weights in a], 1)
        assert_same(found.get(Need("outputs", "value"), Moments), Moments.of(outputs))
        costs = [seen.attention.module.o_proj.weight.double().unflatten(1, (h, -1, e)) for seen in calls]
        gram = sum(torch.einsum("ohqe,ohqf->hef", w, w) for w in costs)
        made = found.get(Need("output_gram", "value"), Moments)
        assert_same(made, Moments(torch.ones(h).double(), torch.zeros(h, e).double(), gram))


def test_more_text_counts_weights_once_and_vectors_of_the_owner_alone() -> None:
    one, more = measured("gemma3n").layers[1], measured("gemma3n", 3).layers[1]
    gram, moments = Need("output_gram", "value"), Need("moments", "key", 8)
    assert torch.equal(one.get(gram, Moments).outer, more.get(gram, Moments).outer)
    assert more.get(moments, Moments).count.eq(3 * N_TOKENS).all()
