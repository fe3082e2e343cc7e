"""Tokens of different classes in one store: what is read, what is counted, what is given back."""

from copy import deepcopy
from threading import local

import pytest
import torch
from tests.closeness import SUM, assert_near
from tests.progressive import SCALE, asked, codec, filled
from tests.synthetic import SMALL, cached
from torch import Tensor

from karhunen.codec import Packed
from karhunen.quantizers.embedded import EmbeddedQuantizer
from karhunen.statistics.need import SLOTS
from karhunen.store.layer_store import LayerStore
from karhunen.store.refinements import Refinements, hottest_line
from karhunen.windows.attention_weights import weight_blocks
from karhunen.windows.refining import Refining
from karhunen.windows.score import Queries

N = 3 + 16 + 80


def refinements(store: LayerStore) -> Refinements:
    assert store.refinements is not None
    return store.refinements


def classes(store: LayerStore) -> Tensor:
    return refinements(store).classes


def by_prefix(store: LayerStore, key: Tensor, value: Tensor) -> list[Tensor]:
    """Keys and values of the coded tokens as the definition has them: every token encoded whole, cut to its class."""
    found = []
    for slot, x in zip(SLOTS, (key, value), strict=True):
        side, coded = codec().layers[0].side(slot), x[:, :, 3 : 3 + store.n_coded]
        at = torch.arange(3, 3 + store.n_coded).expand(len(x), -1)
        planes, out = side.encode(coded, at).planes, torch.empty_like(coded)
        assert isinstance(side.quantizer, EmbeddedQuantizer)
        for n_layers, n in enumerate(side.quantizer.edges):
            cut = side.decode(Packed(planes[:, :n], {}), at).to(out.dtype)
            out = torch.where((classes(store) == n_layers)[:, None, :, None], cut, out)
        if store.exceptions is not None:
            store.exceptions.put_over(out, slot)
        found.append(out)
    return found


@pytest.fixture(scope="module")
def vectors() -> tuple[Tensor, Tensor]:
    return cached(SMALL, 2, N)


def test_what_is_read_is_each_token_cut_to_its_class(vectors: tuple[Tensor, Tensor]) -> None:
    store = filled(*vectors, [60, *[1] * (N - 60)])
    assert store.n_coded == 80
    assert len(classes(store).unique()) == 3
    for got, want in zip(store.read(), by_prefix(store, *vectors), strict=True):
        assert_near(got[:, :, 3:83], want, SUM)


def test_the_classes_are_those_of_the_mean_squared_weights(vectors: tuple[Tensor, Tensor]) -> None:
    """A prompt at once: its last queries, 16 of them, of which the coded tokens have seen all."""
    key, value = (x[:1] for x in vectors)
    rule = codec().window
    assert isinstance(rule, Refining)
    query = Queries(asked(1, N), SCALE)
    weights = torch.cat(list(weight_blocks(query, key, rule.queries)), dim=3)
    scores = weights.square().flatten(1, 2).mean(1)  # [b m t]
    n_seen = (torch.arange(N)[:, None] >= torch.arange(N)).sum(0)
    mean = (scores.sum(1) / n_seen.clamp_max(rule.queries))[:, 3:83]
    store = filled(key, value, [N])
    exact = torch.zeros(1, 80, dtype=torch.bool)
    if store.exceptions is not None:
        exact[0, store.exceptions.tokens.long()] = True
    want = rule.heat(mean.masked_fill(exact, torch.nan), 0, torch.zeros(1, dtype=torch.int64))
    held = refinements(store).held()
    assert held is not None
    assert torch.equal(held.heat, want)


def test_the_same_calls_make_the_same_bytes_and_a_branch_goes_on_alike(vectors: tuple[Tensor, Tensor]) -> None:
    sizes = [60, 20, N - 80]
    straight = filled(*vectors, sizes)
    first = filled(vectors[0][:, :, :80], vectors[1][:, :, :80], sizes[:2])
    twin = first.branch()
    for store in (first, twin):
        rest = slice(80, N)
        queries = Queries(asked(2, N)[:, :, rest], SCALE)
        store.append(vectors[0][:, :, rest], vectors[1][:, :, rest], queries=queries)
        for x, y in zip(store.read(), straight.read(), strict=True):
            assert torch.equal(x, y)
    assert not refinements(first).is_shared
    with pytest.raises(ValueError, match="shared"):
        twin.raise_line(10)


def test_every_byte_is_counted(vectors: tuple[Tensor, Tensor]) -> None:
    store = filled(*vectors, [N])
    n_base = sum(codec().layers[0].side(slot).quantizer.edges[0] for slot in SLOTS)  # type: ignore[attr-defined]
    layers = [
        sum(edges[i + 1] - edges[i] for edges in (codec().layers[0].side(s).quantizer.edges for s in SLOTS))  # type: ignore[attr-defined]
        for i in range(2)
    ]
    want = 2 * 80 * n_base + sum(int((classes(store) > i).sum()) * n for i, n in enumerate(layers))
    account = store.account()
    assert account.codes == want
    assert account.side == 2 * 80 + 2 * 16 * 4 + 16 * 4  # heat; sums and counts of the recent tokens
    assert int(refinements(store).bytes_by_line()[0]) == want - 2 * 80 * n_base


def test_steps_between_which_nothing_changes_share_what_a_reader_made(vectors: tuple[Tensor, Tensor]) -> None:
    """A copy makes its own, since a reader may keep what cannot be copied."""
    store = filled(*vectors, [N])
    held = refinements(store).held()
    assert held is not None
    held.prepared["reader"] = local()
    assert refinements(store).held() is held
    twin = deepcopy(refinements(store)).held()
    assert twin is not None
    assert not twin.prepared
    assert torch.equal(twin.heat, held.heat)
    store.raise_line(4)
    later = refinements(store).held()
    assert later is not None
    assert later is not held
    assert (later.line, held.line) == (4, 0)
    store.crop(50)
    assert refinements(store).held() is not later


def test_rows_are_reordered_and_repeated_with_their_classes(vectors: tuple[Tensor, Tensor]) -> None:
    store = filled(*vectors, [N])
    before, was = store.read(), classes(store)
    store.select(torch.tensor([1, 0, 1]))
    for x, y in zip(store.read(), before, strict=True):
        assert torch.equal(x, y[[1, 0, 1]])
    assert torch.equal(classes(store), was[[1, 0, 1]])


@pytest.mark.parametrize("n", [N - 4, 50, 2])
def test_a_cropped_store_reads_as_before_and_goes_on(vectors: tuple[Tensor, Tensor], n: int) -> None:
    store = filled(*vectors, [N])
    before = store.read()
    store.crop(n)
    assert store.n_tokens == n
    for x, y in zip(store.read(), before, strict=True):
        assert torch.equal(x, y[:, :, :n])
    rest = slice(n, N)
    store.append(vectors[0][:, :, rest], vectors[1][:, :, rest], queries=Queries(asked(2, N)[:, :, rest], SCALE))
    assert store.n_tokens == N
    assert classes(store).shape[1] == store.n_coded == 80


def test_memory_comes_back_coldest_first_down_to_the_base(vectors: tuple[Tensor, Tensor]) -> None:
    store = filled(*vectors, [N])
    full, total = store.account().codes, int(refinements(store).bytes_by_line()[0])
    was = classes(store)
    for share in (0.2, 0.5, 1.0):
        line, _ = hottest_line([refinements(store)], int(share * total) - (full - store.account().codes))
        store.raise_line(line)
        assert full - store.account().codes >= int(share * total)
        assert bool((classes(store) <= was).all())
        for got, want in zip(store.read(), by_prefix(store, *vectors), strict=True):
            assert_near(got[:, :, 3:83], want, SUM)
    assert int(classes(store).sum()) == 0
    assert store.snapshot().refined is None
    assert int(refinements(store).bytes_by_line()[refinements(store).line]) == 0


def test_the_lowest_line_that_gives_enough_is_found(vectors: tuple[Tensor, Tensor]) -> None:
    stores = [refinements(filled(*(x[[i]] for x in vectors), [N])) for i in (0, 1)]
    line, n_first = hottest_line(stores, 40)
    by_line = [s.bytes_by_line() for s in stores]
    freed = [int(b[0] - b[line if i < n_first else line - 1]) for i, b in enumerate(by_line)]
    assert sum(freed) >= 40
    fewer = [int(b[0] - b[line if i < n_first - 1 else line - 1]) for i, b in enumerate(by_line)]
    assert sum(fewer) < 40


def test_without_queries_nothing_is_coded(vectors: tuple[Tensor, Tensor]) -> None:
    store = LayerStore(codec().layers[0], codec().window)
    with pytest.raises(ValueError, match="no queries were shown"):
        store.append(*vectors)


def test_a_store_comes_back_from_its_state_and_goes_on_alike(vectors: tuple[Tensor, Tensor]) -> None:
    first = filled(vectors[0][:, :, :80], vectors[1][:, :, :80], [60, 20])
    first.raise_line(3)
    twin = LayerStore.restored(first.state(), first.codec, first.window, SMALL)
    empty = LayerStore(codec().layers[0], codec().window)
    assert LayerStore.restored(empty.state(), empty.codec, empty.window, SMALL).n_tokens == 0
    for store in (first, twin):
        rest = slice(80, N)
        queries = Queries(asked(2, N)[:, :, rest], SCALE)
        store.append(vectors[0][:, :, rest], vectors[1][:, :, rest], queries=queries)
    assert first.account() == twin.account()
    assert torch.equal(classes(first), classes(twin))
    assert all(torch.equal(x, y) for x, y in zip(first.read(), twin.read(), strict=True))


def test_padding_gets_no_layers(vectors: tuple[Tensor, Tensor]) -> None:
    store = filled(*vectors, [N], torch.tensor([0, 30]))
    assert int(classes(store)[1, :27].sum()) == 0
    assert int(classes(store)[0, :27].sum()) > 0
    alone = LayerStore(codec().layers[0], codec().window)
    part = slice(30, N)
    queries = Queries(asked(2, N)[1:, :, part], SCALE)
    alone.append(vectors[0][1:, :, part], vectors[1][1:, :, part], queries=queries)
    sums, mine = store.observed, alone.observed
    assert sums is not None
    assert sums.sums is not None
    assert mine is not None
    assert mine.sums is not None
    torch.testing.assert_close(sums.sums[1:, -16:], mine.sums[:, -16:])
