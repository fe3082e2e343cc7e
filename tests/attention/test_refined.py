"""Tokens of different classes read from bytes, by the kernels of this machine, as decoding and softmax have them."""

from dataclasses import replace

import pytest
import torch
from tests.closeness import assert_near
from tests.progressive import SCALE, asked, codec
from tests.synthetic import SMALL, cached
from torch import Tensor

from karhunen.attention.fused import TOLERANCE, attend
from karhunen.attention.reader import reader_of
from karhunen.kernels.softmax import attended
from karhunen.store.layer_store import LayerStore
from karhunen.windows.refining import Refining
from karhunen.windows.score import Queries

N = 3 + 16 + 80


def store_of(mean_layers: float, line: int = 0) -> LayerStore:
    made = codec()
    assert isinstance(made.window, Refining)
    store = LayerStore(made.layers[0], replace(made.window, mean_layers=mean_layers))
    key, value = cached(SMALL, 2, N)
    store.append(key, value, queries=Queries(asked(2, N), SCALE))
    store.raise_line(line)
    return store


def decoded(store: LayerStore, query: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: output, and log Σ exp of all scores."""
    key, value = (x.double()[:, :, None] for x in store.read())
    m = query.shape[2]
    scores = query.double().unflatten(1, (SMALL.n_kv_heads, -1)) @ key.mT * SCALE
    later = torch.ones(m, N, dtype=torch.bool).triu(N - m + 1)
    part = attended(scores.masked_fill(later, -torch.inf), value)
    return part.mean.flatten(1, 2), part.log_sum.flatten(1, 2)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(
    ("mean_layers", "line"), [(0.7, 0), (2.0, 0), (0.7, 8), (0.7, 255)],
    ids=["some", "every token has both layers", "half given back", "base alone"],
)  # fmt: skip
def test_reading_bytes_equals_decoding_them(mean_layers: float, line: int, m: int) -> None:
    store = store_of(mean_layers, line)
    held, query = store.snapshot(), asked(2, m, seed=5)
    assert (held.refined is None) == (line == 255)
    assert store.codec is not None
    told: list[Tensor] = []
    got = attend(reader_of(store.codec, held), held, query, scale=SCALE, on_log_sum=told.append)
    want, log_sum = decoded(store, query)
    assert_near(got, want, TOLERANCE)
    assert_near(told[0], log_sum, TOLERANCE)
