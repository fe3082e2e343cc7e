"""A small progressive codec, and stores filled with queries."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import torch
from tests.synthetic import SMALL, seeded, statistics
from torch import Tensor

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.quantizers.embedded import Embedded
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.identity import LayerShape
from karhunen.store.layer_store import LayerStore
from karhunen.windows.score import Queries

SCALE = 0.3
TEXT = "karhunen:progressive=true,bits=2.75,base_bits=2,layers=2,recent=16,sink=3,block_tokens=16"


def recipe(text: str = TEXT) -> Recipe:
    """With short training."""
    made = make(text)
    assert made.key is not None
    assert made.value is not None
    return replace(made, key=_untrained(made.key), value=_untrained(made.value))


def _untrained(side: Side) -> Side:
    assert isinstance(side.quantizer, Embedded)
    return replace(side, quantizer=Embedded(ByteVQ(n_iterations=1), side.quantizer.layers))


@cache
def codec(shape: LayerShape = SMALL) -> Codec:
    """Of one layer."""
    return fit(recipe(), statistics(recipe(), shape))


def asked(b: int, t: int, seed: int = 3) -> Tensor:
    """Queries; those of a shorter text are the first of a longer one's."""
    return torch.randn(t, b, SMALL.n_query_heads, SMALL.key_dim, generator=seeded(seed)).permute(1, 2, 0, 3)


def filled(key: Tensor, value: Tensor, sizes: Iterable[int], offsets: Tensor | None = None) -> LayerStore:
    """A store that was handed keys, values and queries, so many at a time."""
    store = LayerStore(codec().layers[0], codec().window)
    query, start = asked(key.shape[0], key.shape[2]), 0
    for size in sizes:
        part = slice(start, start + size)
        store.append(key[:, :, part], value[:, :, part], offsets, Queries(query[:, :, part], SCALE))
        start += size
    assert start == key.shape[2]
    return store
