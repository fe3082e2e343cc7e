"""Reading a layer's bytes equals decoding them, then softmax: for any codec, batch, mask and number of new tokens."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.closeness import assert_near
from tests.synthetic import SMALL, WINDOW, cached, quick, seeded, statistics
from torch import Tensor

from karhunen.allocation.uniform import Uniform
from karhunen.attention import fused
from karhunen.attention.reader import LEAST_FOLDED_TOKENS, Reader, reader_of
from karhunen.codec import LayerCodec
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.packing.bit_fields import BitFields
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.byte_vq import ByteVQ, TableKind
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.store.layer_store import LayerStore
from karhunen.store.snapshot import Snapshot
from karhunen.transforms.klt import KLT
from karhunen.windows.small_norm import SmallNorm

KINDS: tuple[TableKind, ...] = ("overlapping", "additive")
BYTES = Side(transform=KLT(), quantizer=ByteVQ(n_iterations=1))
SCALARS = Side(transform=KLT())
FLOATS = Side(transform=KLT(), allocation=Uniform(2), quantizer=GroupVQ(size=4, entries="float8_e5m2", n_iterations=1))
OVERLAPPING, ADDITIVE = (Side(transform=KLT(), quantizer=ByteVQ(n_iterations=1, tables=kind)) for kind in KINDS)
BLOCK = 16


def of(key: Side, value: Side = BYTES, keep: bool = False) -> Recipe:
    window = replace(WINDOW, keep=SmallNorm(fraction=0.7)) if keep else WINDOW
    return Recipe("framed", key, value, window)


def framed(side: Side = BYTES, block: int | None = BLOCK, joined: bool = False, center: bool = False) -> Side:
    return replace(side, frame=RopeFrame(block, joined=joined, center=center))


FROM_BYTES = {
    "post_rope": of(framed(block=None)),
    "block": of(framed()),
    "block_centered": of(framed(center=True)),
    "block_centered_joined": of(framed(center=True, joined=True), framed(block=None, joined=True)),
    "pre_rope": of(framed(block=1)),
    "exceptions": of(framed(center=True), keep=True),
    "gain": of(framed(replace(BYTES, quantizer=ByteVQ(gain="float16", n_iterations=1)))),
    "gain_bytes": of(framed(replace(BYTES, quantizer=ByteVQ(gain="log8", n_iterations=1)))),
    "values_centered": of(framed(), replace(BYTES, frame=RopeFrame(center=True))),
    "karhunen": quick(make("karhunen")),
    "overlapping": of(framed(OVERLAPPING, center=True), OVERLAPPING, keep=True),
    "additive": of(framed(ADDITIVE), ADDITIVE),
    "float_tables": of(framed(FLOATS, block=None), FLOATS),
    "float_tables_long_blocks": of(framed(FLOATS, block=LEAST_FOLDED_TOKENS, center=True), FLOATS),
    "float_keys": of(framed(FLOATS, block=None)),
    "kinds_that_differ": of(framed(ADDITIVE, block=None), OVERLAPPING),
}
FROM_COEFFICIENTS = {
    "float_tables_short_blocks": of(framed(FLOATS, block=LEAST_FOLDED_TOKENS - 1, center=True), FLOATS, keep=True),
    "kinds_that_differ_short_blocks": of(framed(ADDITIVE), OVERLAPPING),
    "scalars": of(framed(SCALARS, center=True), SCALARS),
    "scalar_values": of(framed(center=True), SCALARS, keep=True),
    "joined_values": of(framed(), framed(block=None, joined=True)),
    "nova_kv": quick(make("nova_kv")),
    "kivi": quick(make("kivi")),
    "spectra": quick(make("spectra:bits=2")),
}
RECIPES = FROM_BYTES | FROM_COEFFICIENTS


@cache
def codec_of(recipe: Recipe) -> LayerCodec:
    return fit(recipe, statistics(recipe, SMALL)).layers[0]


def layer(recipe: Recipe, t: int, b: int = 1, offsets: Tensor | None = None) -> tuple[LayerCodec, Snapshot]:
    """A layer to which `t` tokens were appended; the newest came in one call and are exact."""
    codec = codec_of(recipe)
    store = LayerStore(codec, recipe.window)
    key, value = cached(SMALL, b, t)
    store.append(key[:, :, :-7], value[:, :, :-7], offsets)
    store.extend(key[:, :, -7:], value[:, :, -7:], offsets)
    return codec, store.snapshot()


def defined(
    codec: LayerCodec,
    held: Snapshot,
    query: Tensor,
    softcap: float | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense attention to decoded tokens, in float64."""
    key, value = (held.dense(codec, slot).double() for slot in ("key", "value"))
    m, n = query.shape[2], key.shape[2]
    scores = query.double().unflatten(1, (key.shape[1], -1)) @ key[:, :, None].mT * SMALL.key_dim**-0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    seen = torch.ones(m, n, dtype=torch.bool).tril(n - m) if mask is None else mask[:, :, None]
    scores = scores.masked_fill(~seen, -torch.inf).flatten(1, 2)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :n]
    return (weights.unflatten(1, (key.shape[1], -1)) @ value[:, :, None]).flatten(1, 2)


def queries(b: int, m: int, n_heads: int = SMALL.n_query_heads) -> Tensor:
    return 3 * torch.randn(b, n_heads, m, SMALL.key_dim, generator=seeded(9))


def assert_equal(codec: LayerCodec, held: Snapshot, query: Tensor, **settings) -> None:
    reader = reader_of(codec, held)
    ours = fused.attend(reader, held, query, scale=SMALL.key_dim**-0.5, **settings)
    assert_near(ours, defined(codec, held, query, **settings), fused.TOLERANCE)


@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("name", RECIPES)
def test_reading_bytes_equals_decoding_them(name: str, m: int, nan_filled_memory: None) -> None:
    codec, held = layer(RECIPES[name], t=90, b=2)
    assert held.n_coded > 0
    assert_equal(codec, held, queries(2, m))


@pytest.mark.parametrize("slot", ["key", "value"])
def test_a_side_without_a_byte_is_read_as_its_mean(slot: str) -> None:
    """As where a budget leaves nothing for the keys or the values of a layer."""
    full = codec_of(RECIPES["block_centered"])
    side = full.side(slot)  # type: ignore[arg-type]
    q = side.quantizer
    assert isinstance(q, ByteQuantizer)
    bare = replace(
        q, plane_group=q.plane_group[:0], plane_size=q.plane_size[:0], coordinates=q.coordinates[:0],
        low=q.low[:, :0], high=q.high[:, :0], scale=q.scale[:0],
    )  # fmt: skip
    codec = replace(full, **{slot: replace(side, quantizer=bare, layout=BitFields(()))})
    store = LayerStore(codec, WINDOW)
    store.append(*cached(SMALL, 1, 90))
    held = store.snapshot()
    assert held.packed is not None
    assert held.packed[slot].planes.shape[1] == 0  # type: ignore[index]
    assert reader_of(codec, held).mode == "bytes"
    assert_equal(codec, held, queries(1, 1))


@pytest.mark.parametrize("name", FROM_BYTES)
def test_codecs_with_byte_tables_are_read_from_bytes(name: str) -> None:
    reader = reader_of(*layer(FROM_BYTES[name], t=60))
    assert (reader.mode, reader.reason) == ("bytes", "")


@pytest.mark.parametrize("name", FROM_COEFFICIENTS)
def test_a_codec_without_byte_tables_says_why(name: str) -> None:
    reader = reader_of(*layer(FROM_COEFFICIENTS[name], t=60))
    assert reader.mode == "coefficients"
    assert reader.reason and reader.reason in reader.description


@pytest.mark.parametrize("name", FROM_BYTES)
def test_byte_codes_of_one_kind_are_scanned_and_float_tables_folded(name: str) -> None:
    reader = reader_of(*layer(FROM_BYTES[name], t=60))
    floats = name.startswith("float") or name == "kinds_that_differ"
    assert (reader.scan is None) == floats == (reader.key is not None)


def test_blocks_too_short_to_fold_float_tables_say_so() -> None:
    reader = reader_of(*layer(FROM_COEFFICIENTS["float_tables_short_blocks"], t=60))
    assert reader.reason == (
        "float tables are read by products with the query, made anew every 1023 tokens; from 1024 on that repays"
    )


@pytest.mark.parametrize("t", [8, 23, 30, 31, 32, 38, 39, 40, 54, 55])
@pytest.mark.parametrize("name", ["block_centered", "exceptions", "karhunen"])
def test_lengths_around_the_window_and_its_pages(name: str, t: int) -> None:
    assert_equal(*layer(RECIPES[name], t), queries(1, 1))


@pytest.mark.parametrize("name", ["block_centered", "post_rope", "exceptions", "scalar_values", "pre_rope"])
@pytest.mark.parametrize("m", [1, 7])
def test_rows_padded_on_the_left_have_positions_of_their_own(name: str, m: int) -> None:
    padding = torch.tensor([0, 5, 40])
    codec, held = layer(RECIPES[name], t=90, b=3, offsets=padding)
    index = torch.arange(90)
    seen = (index <= torch.arange(90 - m, 90)[:, None]) & (index >= padding[:, None, None])
    query = queries(3, m)
    assert_equal(codec, held, query, mask=seen[:, None])
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    ours = fused.attend(reader_of(codec, held), held, query, scale=SMALL.key_dim**-0.5, mask=added)
    expected = defined(codec, held, query, mask=seen[:, None])
    assert_near(ours, expected, fused.TOLERANCE)


@pytest.mark.parametrize("name", ["block_centered", "scalars"])
def test_capped_scores_and_learned_sinks(name: str) -> None:
    codec, held = layer(RECIPES[name], t=70)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    assert_equal(codec, held, queries(1, 7), softcap=4.0, sinks=sinks)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, held = layer(RECIPES["exceptions"], t=200, b=2)
    monkeypatch.setattr(fused, "CHUNK_TOKENS", 24)
    assert_equal(codec, held, queries(2, 7))


def test_a_turn_with_other_padding_is_a_run_of_its_own() -> None:
    codec = codec_of(RECIPES["block_centered"])
    store = LayerStore(codec, WINDOW)
    for turn, offsets in enumerate([torch.tensor([0, 3]), torch.tensor([2, 11])]):
        store.append(*cached(SMALL, 2, 41, seed=turn), offsets)
    assert len(store.snapshot().offsets(0, store.n_coded)) == 2
    assert_equal(codec, store.snapshot(), queries(2, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_read_the_same(dtype: torch.dtype) -> None:
    codec, held = layer(RECIPES["exceptions"], t=90)
    held = replace(
        held,
        sink={slot: x.to(dtype) for slot, x in held.sink.items()},
        recent={slot: x.to(dtype) for slot, x in held.recent.items()},
    )
    query = queries(1, 1).to(dtype)
    ours = fused.attend(reader_of(codec, held), held, query, scale=SMALL.key_dim**-0.5)
    assert ours.dtype == dtype
    step = torch.finfo(dtype).eps  # the decoded path rounds every key and value, this one only the output
    assert_near(ours, defined(codec, held, query), 8 * step)


def test_a_mask_that_differs_between_queries_is_refused() -> None:
    codec, held = layer(RECIPES["block"], t=90)
    mask = torch.ones(1, 1, 2, 90, dtype=torch.bool)
    mask[0, 0, 1, 20] = False
    with pytest.raises(ValueError, match="differs between queries over coded tokens"):
        fused.attend(reader_of(codec, held), held, queries(1, 2), scale=1.0, mask=mask)


def test_a_mean_that_turns_for_ever_is_decoded() -> None:
    recipe = of(framed(block=None, center=True))
    codec = codec_of(recipe)
    reader = Reader.of(codec, SMALL.key_dim, SMALL.value_dim)
    assert (reader.mode, reader.reason) == ("decoded", "the mean of a post-RoPE frame turns with every position")
