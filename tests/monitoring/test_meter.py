"""A meter counts what is coded, and compares outputs as the formula says; unwatched caches do nothing of it."""

from typing import Any

import pytest
import torch
from tests.cli.metered import N_CODED, filled, watched
from tests.hf.tiny import build

import karhunen
from karhunen.hf.probe import cache_argument
from karhunen.monitoring.attention_accuracy import attention_accuracy_delta
from karhunen.monitoring.exporter import CacheCollector
from karhunen.monitoring.meter import Meter, sampled
from karhunen.store.observer import Leaving

ROUNDING = 1e-5  # float32


def test_tokens_coded_are_those_of_the_report() -> None:
    meter = Meter()
    cache = watched(CacheCollector(meter=meter))
    assert meter.tokens_by_layer == dict.fromkeys((0, 1), N_CODED)
    assert meter.n_encoded == N_CODED == cache.coded_layers()[0].store.n_coded
    assert meter.encode_seconds > 0
    cache.close()


def test_before_any_query_was_seen_the_exact_keys_ask() -> None:
    meter, model = Meter(), build("llama")
    cache = filled(model, 100, CacheCollector(meter=meter))
    dense = filled(model, 100)
    for index, layer in enumerate(cache.coded_layers()):
        decoded = [x[0, :, 3 : 3 + N_CODED] for x in layer.store.read()]
        exact = [_exact(model, index)[slot][0, :, 3 : 3 + N_CODED] for slot in (0, 1)]
        queries = layer.store.exact("key")[1][0]
        wanted = attention_accuracy_delta(
            queries, torch.full((queries.shape[1],), N_CODED), (exact[0], exact[1]), (decoded[0], decoded[1])
        )
        assert meter.moved[index].asked == "keys"
        assert meter.moved[index].delta == pytest.approx(wanted, rel=1e-3)
        assert wanted > 0
    cache.close()
    dense.close()


def _exact(model: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    from karhunen.hf.cache import dense_cache

    cache, tokens = dense_cache(model), torch.arange(600) % 90 + 3
    with torch.no_grad():
        model(input_ids=tokens[None, :100], use_cache=True, **{cache_argument(model): cache})
    return cache.layers[layer].keys, cache.layers[layer].values


def test_where_bytes_are_read_the_models_own_queries_ask() -> None:
    """Each step's queries are kept, and the newest ask when tokens leave."""
    meter, model = Meter(every=1, n_layers=1), build("llama")
    karhunen.enable(model)
    cache = filled(model, 100, CacheCollector(meter=meter))
    told: list[tuple[Leaving, torch.Tensor]] = []
    store, looking = cache.coded_layers()[0].store, cache.coded_layers()[0].store.observers[0]

    class Telling:
        def left(self, leaving: Leaving) -> None:
            told.append((leaving, torch.cat(list(looking.queries), 1)))

    store.observers = (*store.observers, Telling())
    with torch.no_grad():
        for i in range(12):
            model(input_ids=torch.tensor([[5 + i]]), use_cache=True, **{cache_argument(model): cache})
    (leaving, queries) = told[-1]
    assert queries.shape == (4, min(16, queries.shape[1]), 12)
    n = leaving.key.shape[2]
    side = [store.codec.side(slot) for slot in ("key", "value")]
    decoded = [s.distort(x, leaving.positions)[0] for s, x in zip(side, (leaving.key, leaving.value), strict=True)]
    above = below = 0.0
    for head in range(4):
        for query in queries[head]:
            k, v = leaving.key[0, head // 2], leaving.value[0, head // 2]
            one = (k @ query * 12**-0.5).softmax(0) @ v
            other = (decoded[0][head // 2].float() @ query * 12**-0.5).softmax(0) @ decoded[1][head // 2].float()
            above, below = above + float((one - other).square().sum()), below + float(one.square().sum())
    assert n == 8
    assert meter.moved[0].asked == "queries"
    assert meter.moved[0].delta == pytest.approx((above / below) ** 0.5, rel=ROUNDING * 100)
    assert list(meter.moved) == [0]
    cache.close()


def test_what_it_measures_changes_no_byte_and_a_branch_is_not_watched() -> None:
    model = build("llama")
    plain, seen = filled(model, 100), filled(model, 100, CacheCollector(meter=Meter()))
    for one, other in zip(plain.coded_layers(), seen.coded_layers(), strict=True):
        mine, theirs = one.store.tensors(), other.store.tensors()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert one.on_query is None
        assert one.store.observers == ()
    assert all(layer.on_query is None and not layer.store.observers for layer in seen.branch().coded_layers())


@pytest.mark.parametrize(("n", "wanted"), [(0, []), (1, [2]), (2, [2, 11]), (3, [2, 5, 11]), (9, [2, 3, 5, 7, 11])])
def test_sampled_layers_are_spread(n: int, wanted: list[int]) -> None:
    assert sampled([2, 3, 5, 7, 11], n) == wanted


@pytest.mark.parametrize("wrong", [{"every": 0}, {"n_layers": -1}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="use 1 or more"):
        Meter(**wrong)
