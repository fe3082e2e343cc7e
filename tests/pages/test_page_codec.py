"""Pages: what goes in comes out, in bulk, one by one, by layer; sizes known beforehand; heads cut and joined."""

from dataclasses import replace

import pytest
import torch
from tests.synthetic import SMALL, cached, codec, quick, statistics
from torch import Tensor

from karhunen.allocation.uniform import Uniform
from karhunen.codec import Codec, LayerCodec
from karhunen.fitting import fit
from karhunen.pages import PageCodec, cut_heads, cut_layers, join_heads, join_layers, page_keys
from karhunen.pages.frame import read
from karhunen.recipe import Recipe
from karhunen.recipes import make
from karhunen.statistics.identity import LayerShape
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.small_norm import NormBelow, token_norms

N, N_PAGES = 64, 3
CODED = ("int4", "fp8", "kivi", "nova_kv", "karhunen", "spectra", "kvtc", "turboquant", "kitty", "kvquant", "ott")
CUT = ("full", "int4", "fp8", "kivi", "nova_kv", "karhunen", "turboquant")
MIXED = (SMALL, LayerShape("sliding", 2, 4, 32, 32, 16), LayerShape("full", 2, 2, 16, 48), SMALL)


def pages_of(name: str, **settings: object) -> PageCodec:
    return PageCodec(codec(name), dtype=torch.float32, **settings)  # type: ignore[arg-type]


def given(n: int = N * N_PAGES, shape: LayerShape = SMALL) -> tuple[Tensor, Tensor]:
    key, value = cached(shape, 1, n)
    return key[0], value[0]


def excepting(name: str, share: float) -> Codec:
    """A codec that keeps the shortest `share` of the given tokens exact."""
    made, norms = codec(name), given()[1].square().sum((0, 2)).sqrt()
    rule = NormBelow("value", float(norms.quantile(share)))
    layer = made.layers[0]
    return replace(made, layers={0: LayerCodec(layer.key, layer.value, rule)})


@pytest.mark.parametrize("name", CODED)
def test_a_page_decodes_to_what_the_codec_decodes(name: str) -> None:
    """The window's sinks, which begin the text, are exact; every other token is what attention would have read."""
    maker, (key, value) = pages_of(name), given()
    page_codec, n_sink = maker.codec.layers[0], maker.codec.window.sink_tokens
    pages = maker.encode_pages({0: (key, value)}, torch.arange(N * N_PAGES), N)
    got = maker.decode_pages(pages)[0]
    left_out = (torch.arange(N * N_PAGES) < n_sink)[None]
    for slot, x, y in zip(("key", "value"), (key, value), got, strict=True):
        side, at = page_codec.side(slot), torch.arange(N * N_PAGES)[None]  # type: ignore[arg-type]
        assert torch.equal(y[:, :n_sink], x[:, :n_sink])
        want = side.decode(side.encode(x[None], at, left_out), at)[0]
        assert torch.equal(y[:, n_sink:], want[:, n_sink:].float())


@pytest.mark.parametrize("name", [*CODED, "full"])
def test_pages_made_together_one_by_one_and_by_layer_are_the_same_bytes(name: str) -> None:
    recipe = quick(make(name))
    shapes = (SMALL, SMALL)
    made = fit(recipe, statistics(recipe, *shapes))
    maker = PageCodec(made, dtype=torch.bfloat16)
    layers = {i: tuple(x.bfloat16() for x in given()) for i in range(2)}
    at = torch.arange(N * N_PAGES)
    together = maker.encode_pages(layers, at, N)  # type: ignore[arg-type]
    assert len(together) == N_PAGES
    for i, page in enumerate(together):
        run = slice(i * N, (i + 1) * N)
        mine = {layer: (key[:, run], value[:, run]) for layer, (key, value) in layers.items()}
        assert maker.encode(mine, at[run]) == page
        single = [maker.encode({layer: pair}, at[run]) for layer, pair in mine.items()]
        assert join_layers(single) == page
        assert cut_layers(page, [1]) == single[1]
        by_layer = dict(maker.decode_layers([page]))
        assert by_layer.keys() == {0, 1}
        assert torch.equal(maker.decode(page, [1])[1][0], by_layer[1][0])


@pytest.mark.parametrize("name", [*CODED, "full"])
def test_the_size_of_a_page_is_known_before_it_is_made(name: str) -> None:
    maker, layers = pages_of(name), {0: given()}
    pages = maker.encode_pages(layers, torch.arange(N * N_PAGES), N)
    bounds = [maker.page_bytes(N, i * N) for i in range(N_PAGES)]
    assert maker.is_fixed == (name != "kvtc")
    if maker.is_fixed:
        assert [len(page) for page in pages] == bounds
    else:
        assert all(len(page) <= bound for page, bound in zip(pages, bounds, strict=True))
    assert all(maker.page_bytes(N) >= bound for bound in bounds)


def test_sizes_bound_pages_with_exact_tokens_and_deflated_codes() -> None:
    for share in (0.01, 0.1, 0.9):
        maker = PageCodec(excepting("int4", share), torch.float32, entropy=True)
        pages = maker.encode_pages({0: given()}, torch.arange(N * N_PAGES), N)
        assert not maker.is_fixed
        assert all(len(page) <= maker.page_bytes(N, i * N) for i, page in enumerate(pages))


def named_by(rule: NormBelow, key: Tensor, value: Tensor) -> Tensor:
    """Whom the rule's threshold names."""
    return token_norms((key if rule.slot == "key" else value)[None])[0] < rule.threshold


def test_tokens_that_the_rule_names_are_exact_in_the_page() -> None:
    maker, (key, value) = PageCodec(excepting("kivi", 0.03), torch.float32), given()
    pages = maker.encode_pages({0: (key, value)}, torch.arange(N * N_PAGES), N)
    got = maker.decode_pages(pages)[0]
    rule = maker.codec.layers[0].exceptions
    assert rule is not None
    named = named_by(rule, key, value)
    assert 4 < int(named.sum()) < 8
    for x, y in zip((key, value), got, strict=True):
        assert torch.equal(y[:, named], x[:, named])
        assert not torch.equal(y[:, ~named], x[:, ~named])


def test_of_more_exact_tokens_than_a_page_has_room_for_the_shortest_stay() -> None:
    maker, (key, value) = PageCodec(excepting("int4", 0.9), torch.float32), given()
    page = maker.encode({0: (key[:, :N], value[:, :N])}, torch.arange(N, 2 * N))
    (section,) = read(page).sections
    kept = torch.frombuffer(bytearray(section.exact), dtype=torch.int32)
    norms = value[:, :N].double().square().sum((0, 2)).sqrt()
    assert kept.tolist() == norms.argsort()[: len(kept)].sort().values.tolist()
    assert len(kept) == 4


def test_deflated_codes_escape_to_fixed_width() -> None:
    """Codes of noise do not shrink: the page is not larger than without. Zeros do."""
    noise, zeros = given(N), tuple(torch.zeros_like(x) for x in given(N))
    plain, deflated = pages_of("int8"), pages_of("int8", entropy=True)
    at = torch.arange(N, 2 * N)
    assert len(deflated.encode({0: noise}, at)) <= len(plain.encode({0: noise}, at))
    assert len(deflated.encode({0: zeros}, at)) < len(plain.encode({0: zeros}, at)) / 2  # type: ignore[dict-item]
    for x in (noise, zeros):
        pair = plain.decode(plain.encode({0: x}, at))[0]  # type: ignore[dict-item]
        assert all(map(torch.equal, pair, deflated.decode(deflated.encode({0: x}, at))[0]))  # type: ignore[dict-item]


@pytest.mark.parametrize("name", CUT)
def test_heads_are_cut_and_joined_without_decoding(name: str) -> None:
    whole, layers = pages_of(name), {0: given()}
    pages = whole.encode_pages(layers, torch.arange(N * N_PAGES), N)
    halves = [[cut_heads(page, i, 2) for page in pages] for i in range(2)]
    assert [join_heads([a, b]) for a, b in zip(*halves, strict=True)] == pages
    want = whole.decode_pages(pages)[0]
    for i, half in enumerate(halves):
        got = pages_of(name, shard=(i, 2)).decode_pages(half)[0]
        assert all(torch.equal(x, y[i : i + 1]) for x, y in zip(got, want, strict=True))
        with pytest.raises(ValueError, match="heads"):
            whole.decode_pages(half)


@pytest.mark.parametrize("name", CUT)
def test_a_shard_that_knows_its_own_heads_only_makes_the_pages_that_cutting_makes(name: str) -> None:
    whole, (key, value) = pages_of(name), given(N)
    exact = None
    if whole.codec.layers and whole.codec.layers[0].exceptions:
        exact = {0: named_by(whole.codec.layers[0].exceptions, key, value)}
        with pytest.raises(ValueError, match="all heads"):
            pages_of(name, shard=(0, 2)).encode({0: (key[:1], value[:1])}, torch.arange(N))
    page = whole.encode({0: (key, value)}, torch.arange(N))
    if whole.codec.layers:
        room = 4 if exact else 0
        with pytest.raises(ValueError, match=f"names 64 tokens of a page of 64, which has room for {room}"):
            whole.encode({0: (key, value)}, torch.arange(N), {0: torch.ones(N, dtype=torch.bool)})
    for i in range(2):
        mine = {0: (key[i : i + 1].contiguous(), value[i : i + 1].contiguous())}
        assert pages_of(name, shard=(i, 2)).encode(mine, torch.arange(N), exact) == cut_heads(page, i, 2)


@pytest.mark.parametrize("name", ["spectra", "kitty"])
def test_heads_that_are_coded_together_are_not_cut(name: str) -> None:
    maker = pages_of(name)
    with pytest.raises(ValueError, match=r"layer 0 cannot be cut.*over all heads"):
        cut_heads(maker.encode({0: given(N)}, torch.arange(N)), 0, 2)
    with pytest.raises(ValueError, match="layer 0 cannot be cut into 2 parts"):
        pages_of(name, shard=(0, 2))


def test_layers_of_other_sizes_and_kinds_share_a_page() -> None:
    """Keys and values of different length; a sliding layer has no place in it; a layer left exact goes in as it is."""
    recipe = quick(make("int4"))
    made = fit(recipe, statistics(recipe, *MIXED))
    made = replace(made, layers={i: layer for i, layer in made.layers.items() if i != 3}, left_exact={3: "asked for"})
    maker = PageCodec(made, torch.float32)
    assert maker.layers == (0, 2, 3)
    layers = {i: given(N, MIXED[i]) for i in maker.layers}
    page = maker.encode(layers, torch.arange(N))
    assert len(page) == maker.page_bytes(N)
    got = maker.decode(page)
    assert all(torch.equal(x, y) for x, y in zip(got[3], layers[3], strict=True))
    assert [tuple(x.shape) for x in got[2]] == [(2, N, 16), (2, N, 48)]
    with pytest.raises(ValueError, match=r"layer 1 has no place.*\[0, 2, 3\]"):
        maker.encode({1: given(N)}, torch.arange(N))


def test_symbols_that_share_a_byte_with_another_head_are_packed_anew_for_each() -> None:
    """Heads of 12 coefficients at 3 bits: 36 bits each, so that a byte of a token holds symbols of two heads."""
    shape = LayerShape("full", 2, 4, 12, 12)
    side = replace(make("int8").key, allocation=Uniform(3))  # type: ignore[type-var]
    recipe = Recipe("odd", side, side, SinkRecent(1, 8, 4))
    made = fit(recipe, statistics(recipe, shape))
    whole, layers = PageCodec(made, torch.float32), {0: given(N, shape)}
    page = whole.encode(layers, torch.arange(N))
    halves = [cut_heads(page, i, 2) for i in range(2)]
    assert join_heads(halves) == page
    want, at = whole.decode(page)[0], torch.arange(N)[None]
    assert torch.equal(want[0][:, 1:], made.layers[0].key.distort(layers[0][0][None], at)[0, :, 1:].float())
    for i, half in enumerate(halves):
        got = PageCodec(made, torch.float32, shard=(i, 2)).decode(half)[0]
        assert all(torch.equal(x, y[i : i + 1]) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["int4", "karhunen", "full"])
def test_views_make_the_pages_that_copies_make(name: str) -> None:
    """Transposed, sliced and expanded tensors, as engines hand over blocks of their pools."""
    key, value = given(N)
    pool = torch.full((3, N, 2, 80), torch.nan)
    pool[1, :, :, 7:39], pool[2, :, :, 7:39] = key.transpose(0, 1), value.transpose(0, 1)
    views = pool[1, :, :, 7:39].transpose(0, 1), pool[2, :, :, 7:39].transpose(0, 1)
    assert not views[0].is_contiguous()
    maker, at = pages_of(name), torch.arange(N)
    assert maker.encode({0: views}, at) == maker.encode({0: (key, value)}, at)
    same = (key[:1].expand(2, -1, -1), value[:1].expand(2, -1, -1))
    copied = {0: (same[0].contiguous(), same[1].contiguous())}
    assert maker.encode({0: same}, at) == maker.encode(copied, at)


def test_what_makes_no_page_is_refused() -> None:
    maker, (key, value) = pages_of("kivi"), given(N)
    at = torch.arange(N)
    for layers, positions, words in (
        ({0: (key[:, :33], value[:, :33])}, at[:33], "multiple of 32"),
        ({0: (key, value)}, at + 1, "begin at a multiple of 32"),
        ({0: (key, value)}, at * 2, "rise by one"),
        ({0: (key.half(), value.half())}, at, "wants torch.float32"),
        ({0: (key[:1], value[:1])}, at, r"\(2, 64, 32\)"),
        ({0: (key * torch.nan, value)}, at, "NaN"),
        ({}, at, "0 layers"),
    ):
        with pytest.raises(ValueError, match=words):
            maker.encode(layers, positions)
    page = maker.encode({0: (key, value)}, at)
    with pytest.raises(ValueError, match="do not follow"):
        maker.decode_pages([page, page])
    with pytest.raises(ValueError, match="drops tokens"):
        PageCodec(fit(make("streaming_llm"), statistics(make("streaming_llm"), SMALL)))
    with pytest.raises(ValueError, match="not a fingerprint"):
        pages_of("int4", weights="abc")
    with pytest.raises(ValueError, match="float64"):
        PageCodec(codec("int4"), torch.float64)


def test_pages_of_others_are_refused_with_the_reason() -> None:
    mine, layers, at = pages_of("int4", weights="1" * 32, tokenizer="2" * 32), {0: given(N)}, torch.arange(N)
    page = mine.encode(layers, at)
    for other, words in (
        (pages_of("int8", weights="1" * 32), "another codec"),
        (pages_of("int4", weights="3" * 32), "other weights"),
        (pages_of("int4", tokenizer="3" * 32), "another tokenizer"),
        (PageCodec(codec("int4", LayerShape("full", 2, 2, 32, 32)), torch.float32), "another model"),
        (PageCodec(codec("int4"), torch.bfloat16), "float32, not of bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            other.decode(page)
    assert pages_of("int4").decode(page)  # weights that are not known are any


def test_keys_of_pages_are_chained_and_hold_the_owner() -> None:
    tokens = list(range(100))
    keys = page_keys(b"me", tokens, 32)
    assert len(keys) == 3
    assert len(set(keys)) == 3
    assert page_keys(b"me", [*tokens[:64], 7, *tokens[65:]], 32)[:2] == keys[:2]
    assert page_keys(b"me", [*tokens[:64], 7, *tokens[65:]], 32)[2] != keys[2]
    assert page_keys(b"me", [7, *tokens[1:]], 32)[1] != keys[1]
    assert set(page_keys(b"you", tokens, 32)).isdisjoint(keys)
    assert set(page_keys(b"me", tokens, 16)).isdisjoint(keys)
    assert page_keys(b"me", tokens[:31], 32) == []
