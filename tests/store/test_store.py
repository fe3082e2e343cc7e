"""Positions, buffers and the account of a store, by hand."""

from dataclasses import replace

import pytest
import torch
from tests.closeness import SUM, assert_near
from tests.synthetic import SMALL, cached, codec, statistics

from karhunen.codec import Packed, SideCodec
from karhunen.fitting import EXACT_RESERVE, fit
from karhunen.recipes import make
from karhunen.statistics.moments import Moments
from karhunen.store.account import Account
from karhunen.store.buffers import TokenBuffer
from karhunen.store.layer_store import LayerStore
from karhunen.store.positions import Positions

CPU = torch.device("cpu")


def test_positions_are_indices_minus_the_padding_of_the_row() -> None:
    at = Positions().starting(0, torch.tensor([0, 3])).at(2, 6, 2, CPU)
    assert at.tolist() == [[2, 3, 4, 5], [-1, 0, 1, 2]]
    assert Positions().at(2, 4, 2, CPU).tolist() == [[2, 3], [2, 3]]


def test_tokens_keep_the_offset_they_came_with() -> None:
    places = Positions().starting(0, torch.tensor([1])).starting(4, torch.tensor([2])).starting(6, torch.tensor([2]))
    assert places.at(2, 8, 1, CPU).tolist() == [[1, 2, 2, 3, 4, 5]]
    assert len(places.runs) == 2


def test_cropped_tokens_leave_no_offset_behind() -> None:
    """Cut back to before a change of offset: new tokens with the new offset get it from where they start."""
    store = LayerStore(codec("spectra").layers[0], codec("spectra").window)
    key, value = cached(SMALL, 1, 80)
    store.append(key[:, :, :40], value[:, :, :40], torch.tensor([0]))
    store.append(key[:, :, 40:], value[:, :, 40:], torch.tensor([5]))
    store.crop(30)
    store.append(key[:, :, 30:], value[:, :, 30:], torch.tensor([5]))
    straight = LayerStore(codec("spectra").layers[0], codec("spectra").window)
    straight.append(key[:, :, :30], value[:, :, :30], torch.tensor([0]))
    straight.append(key[:, :, 30:], value[:, :, 30:], torch.tensor([5]))
    got, want = store.packed("key"), straight.packed("key")
    assert got is not None
    assert want is not None
    assert torch.equal(got.planes, want.planes)


def test_a_buffer_grows_by_little_and_gives_room_back() -> None:
    buffer = TokenBuffer()
    for n in range(1, 1001):
        buffer.append(torch.full((1, 2, 1), n % 100, dtype=torch.uint8))
        assert buffer.length == n
        assert buffer.nbytes <= 2 * (n + n // 32 + 1)
    assert buffer.view()[0, 1].tolist() == [n % 100 for n in range(1, 1001)]
    buffer.crop(10)
    assert buffer.nbytes == 20
    assert buffer.storage().untyped_storage().nbytes() == 20
    with pytest.raises(ValueError, match="nothing was appended"):
        TokenBuffer().view()


def test_the_ratio_is_uncompressed_over_held() -> None:
    """100 elements of bfloat16 in 20 bytes: ten times smaller, 1.6 bits each."""
    account = Account(codes=10, side=6, exact=4, dense=200, coded_dense=160, n_elements=100, n_coded_elements=80)
    assert account.held == 20
    assert account.ratio == 10
    assert account.bits_per_element == 1.6
    assert account.coded_bits_per_element == 1.6
    assert account.coded_ratio == 10
    assert (account + account).ratio == 10
    assert Account().ratio == 1


def test_coded_tokens_that_are_held_exact_as_well_count_with_both() -> None:
    account = Account(
        codes=10, side=6, exact=4, dense=200, coded_dense=160, n_elements=100, n_coded_elements=80, exceptions=2
    )
    assert account.held == 20
    assert account.coded_bits_per_element == 1.8
    assert (account + account).coded == 36
    recipe = make("karhunen")
    made = fit(recipe, statistics(recipe, SMALL))
    store = LayerStore(made.layers[0], made.window)
    key, value = cached(SMALL, 1, 400)
    value[:, :, 40] *= 1e-3  # a token of short values
    store.append(key, value)
    assert store.exceptions is not None
    assert store.account().exceptions == sum(x.nbytes for x in store.exceptions.tensors().values()) > 0


def test_the_budget_pays_for_tokens_kept_exact() -> None:
    """A tenth of the tokens kept exact, and the reserve for texts with more of them, takes 2.72 bits of 4."""
    recipe = make("karhunen:bits=4")
    seen = statistics(recipe, SMALL)
    layer = seen.layers[0]
    count = layer.get(recipe.about("key"), Moments).count.max()
    rare = replace(seen, layers={0: replace(layer, n_tokens=round(float(count) / 0.9))})
    side = fit(recipe, rare).layers[0]
    n_elements = 2 * 2 * 32
    bits = sum(sum(side.side(slot).quantizer.widths) for slot in ("key", "value"))
    assert bits == pytest.approx((4 - 16 * 0.1 * EXACT_RESERVE) * n_elements, abs=9)


@pytest.mark.parametrize(("name", "bits"), [("fp8", 8.5), ("int8", 9.0), ("int4", 5.0), ("int2", 3.0), ("kivi", 3.0)])
def test_the_rate_of_the_coded_tokens_is_what_their_layout_says(name: str, bits: float) -> None:
    """Heads of 32: a range costs one bit per element, a scale half of that."""
    key, value = cached(SMALL, 1, 87)
    store = LayerStore(codec(name).layers[0], codec(name).window)
    store.append(key, value)
    account = store.account()
    assert store.n_coded == 64
    assert account.coded_bits_per_element == bits
    assert account.exact == 4 * 23 * 2 * (32 + 32)
    assert account.codes + account.side == 64 * 128 * bits / 8
    assert account.ratio == account.dense / account.held


def test_a_near_maximal_value_stays_finite_in_float16() -> None:
    """A float16 step that was rounded up puts the highest point of a range beyond the largest float16."""
    key, value = (x.half() for x in cached(SMALL, 1, 60))
    key[0, 0, 20:30, 5] = 65504.0
    store = LayerStore(codec("int8").layers[0], codec("int8").window)
    store.append(key, value)
    got = store.read()[0]
    assert got.dtype == torch.float16
    assert torch.isfinite(got).all()
    assert got[0, 0, 25, 5] > 65000


def test_the_uncompressed_recipe_holds_the_dense_bytes_and_no_more() -> None:
    made = make("full")
    store = LayerStore(None, made.window)
    key, value = cached(SMALL, 2, 50)
    for start in range(0, 50, 10):
        store.append(key[:, :, start : start + 10], value[:, :, start : start + 10])
    assert store.account().ratio == 1
    assert torch.equal(store.read()[0], key)


def test_a_branch_decodes_nothing_that_was_decoded_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (key, value) = codec("int4:recent=16"), cached(SMALL, 1, 120)
    kept, plain = (LayerStore(made.layers[0], made.window, keep) for keep in (True, False))
    for store in (kept, plain):
        store.append(key[:, :, :80], value[:, :, :80])
    before, n_before = kept.read(), kept.n_coded
    decoded: list[int] = []

    def counted(self: SideCodec, packed: Packed, positions: torch.Tensor) -> torch.Tensor:
        decoded.append(positions.shape[-1])
        return decode(self, packed, positions)

    decode = SideCodec.decode
    monkeypatch.setattr(SideCodec, "decode", counted)
    branch = kept.branch()
    assert all(torch.equal(a, b) for a, b in zip(branch.read(), before, strict=True))
    assert not decoded
    for store in (branch, plain):
        store.append(key[:, :, 80:], value[:, :, 80:])
    assert all(torch.equal(a, b) for a, b in zip(branch.read(), plain.read(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept.read(), before, strict=True)), "the branch went on by itself"
    assert decoded[:2] == [branch.n_coded - n_before] * 2, "only what the branch coded, of keys and of values"
    assert 0 < n_before < branch.n_coded


@pytest.mark.parametrize("name", ["spectra", "kivi", "karhunen", "kvquant", "streaming_int4", "kvtc"])
def test_a_store_that_keeps_decoded_tokens_reads_the_same(name: str) -> None:
    """Through growth, cuts, reordered rows and dropped tokens; a codec of pages is decoded whole as ever."""
    made = codec(name)
    plain, kept = (LayerStore(made.layers[0], made.window, keep) for keep in (False, True))
    key, value = cached(SMALL, 2, 400)

    def same() -> None:
        for one, other in zip(plain.read(), kept.read(), strict=True):
            assert_near(one, other, SUM)

    def both(method: str, *given: object) -> None:
        for store in (plain, kept):
            getattr(store, method)(*given)
        same()

    for start in (0, 150, 151, 190):
        both("append", key[:, :, start : start + 40], value[:, :, start : start + 40])
    both("append", key[:, :, 200:], value[:, :, 200:])
    both("select", torch.tensor([1, 0, 1]))
    if not made.window.drops:
        both("crop", plain.n_tokens - 70)
    both("append", key[[0, 1, 0], :, :60], value[[0, 1, 0], :, :60])
    assert (kept.n_coded > 0) == (plain.n_coded > 0) is True
