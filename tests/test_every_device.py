"""The same tokens on a device that refuses to meet the host: the same bytes, the same answers, no waiting in a step."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attention.test_fused import FROM_BYTES, RECIPES, codec_of, queries
from tests.closeness import assert_near
from tests.fake_device import FakeDevice, fake_device
from tests.hf.test_cache import fitted, generate, model_of, run, tokens
from tests.hf.tiny import build
from tests.synthetic import SMALL, cached, codec
from torch import Tensor

from karhunen.attention import fused
from karhunen.attention.reader import reader_of
from karhunen.calibration.calibrate import calibrate
from karhunen.codec import LayerCodec
from karhunen.device import device_of
from karhunen.evaluation.scores.attention_error import attention_errors, capture
from karhunen.fitting import fit
from karhunen.hf.attention import enable
from karhunen.hf.cache import CompressedCache
from karhunen.hf.describe import identity_held
from karhunen.hf.probe import updates
from karhunen.kernels.paths import available, fastest, forced
from karhunen.pages.page_codec import PageCodec
from karhunen.recipes import make
from karhunen.recipes import names as recipe_names
from karhunen.statistics.need import SLOTS
from karhunen.store import snapshot
from karhunen.store.layer_store import LayerStore
from karhunen.windows.base import Window

TOLERANCE = 1e-6
"""The fake device computes as the host does, but for the order of a sum where chunks are merged."""
N_PROMPT = 40


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with torch.no_grad(), fake_device() as found:
        yield found


@pytest.fixture(autouse=True)
def _definitions() -> Iterator[None]:
    """What is compared was computed the same way on both sides."""
    with forced("naive"):
        yield


def bits(store: LayerStore) -> list[Tensor]:
    found = [packed for slot in SLOTS if (packed := store.packed(slot)) is not None]
    return [x.cpu().contiguous().view(torch.uint8) for packed in found for x in packed.tensors()]


def filled(made: LayerCodec, window: Window, x: tuple[Tensor, Tensor], *cuts: int, offsets: Any = None) -> LayerStore:
    store = LayerStore(made, window)
    for start, stop in zip((0, *cuts), (*cuts, x[0].shape[2]), strict=True):
        store.append(*(side[:, :, start:stop] for side in x), offsets)
    return store


def there(device: FakeDevice, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0].to(device.device), x[1].to(device.device)


@pytest.mark.parametrize("name", [n for n in recipe_names() if make(n).key is not None])
def test_every_recipe_codes_and_decodes_where_its_vectors_lie(name: str, device: FakeDevice) -> None:
    made, x = codec(name), cached(SMALL, 2, 70)
    ours, theirs = (filled(made.layers[0], made.window, y, 33) for y in (there(device, x), x))
    assert all(torch.equal(a, b) for a, b in zip(bits(ours), bits(theirs), strict=True))
    for a, b in zip(ours.read(), theirs.read(), strict=True):
        assert a.device == device.device
        assert_near(a.cpu(), b, TOLERANCE)


@pytest.mark.parametrize("name", ["karhunen", "kivi", "nova_kv"])
def test_a_store_is_cropped_reordered_branched_and_continued(name: str, device: FakeDevice) -> None:
    made, x, more = codec(name), cached(SMALL, 3, 70), cached(SMALL, 4, 40, seed=1)
    found = []
    for move in (lambda y: there(device, y), lambda y: y):
        store = LayerStore(made.layers[0], made.window)
        store.append(*move(x))
        store.crop(61)
        rows = torch.tensor([2, 0, 0, 1])
        store.select(rows.to(device.device) if move(x)[0].is_cuda else rows)
        twin = store.branch()
        twin.append(*move(more))
        state = twin.state()
        found.append((twin, store, LayerStore.restored(state, made.layers[0], made.window, SMALL)))
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bits(ours), bits(theirs), strict=True))
        assert_near(ours.read()[0].cpu(), theirs.read()[0], TOLERANCE)


READ = {
    "karhunen", "pre_rope", "block_centered_joined", "exceptions", "gain_bytes", "kinds_that_differ", "float_tables",
    "float_tables_short_blocks", "scalar_values", "kivi",
}  # fmt: skip
"""One of each way to read; the others differ in what lies in the tables."""


@pytest.mark.parametrize("name", [n if n in READ else pytest.param(n, marks=pytest.mark.long) for n in RECIPES])
def test_attention_reads_bytes_on_their_device(name: str, device: FakeDevice) -> None:
    recipe, x = RECIPES[name], cached(SMALL, 2, 90)
    for m in (1, 7):
        assert_near(*read_twice(device, codec_of(recipe), recipe.window, x, queries(2, m)), TOLERANCE)


@pytest.mark.parametrize(
    ("name", "m"),
    [("exceptions", 1), ("scalar_values", 7), ("pre_rope", 1), ("gain_bytes", 7),
     pytest.param("block_centered", 1, marks=pytest.mark.long)],
)  # fmt: skip
def test_rows_padded_on_the_left(name: str, m: int, device: FakeDevice) -> None:
    recipe, padding = RECIPES[name], torch.tensor([0, 5, 40])
    index = torch.arange(90)
    seen = ((index <= torch.arange(90 - m, 90)[:, None]) & (index >= padding[:, None, None]))[:, None]
    x, query = cached(SMALL, 3, 90), queries(3, m)
    assert_near(*read_twice(device, codec_of(recipe), recipe.window, x, query, padding, mask=seen), TOLERANCE)


def test_chunks_bound_the_memory_of_the_definition(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK_TOKENS", 24)
    recipe = RECIPES["exceptions"]
    x = cached(SMALL, 2, 200)
    assert_near(*read_twice(device, codec_of(recipe), recipe.window, x, queries(2, 1)), TOLERANCE)


def read_twice(
    device: FakeDevice, made: LayerCodec, window: Window, x: tuple[Tensor, Tensor], query: Tensor,
    offsets: Tensor | None = None, **settings: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the same tokens there and here."""
    found = []
    for move in (lambda y: y.to(device.device), lambda y: y):
        y = tuple(move(side) for side in x)
        store = LayerStore(made, window)
        at = None if offsets is None else move(offsets)
        store.append(y[0][:, :, :-7], y[1][:, :, :-7], at)
        store.extend(y[0][:, :, -7:], y[1][:, :, -7:], at)
        held = store.snapshot()
        given = {name: move(value) for name, value in settings.items()}
        reader = reader_of(made, held)
        found.append(fused.attend(reader, held, move(query), scale=SMALL.key_dim**-0.5, **given).cpu())
    return found[0], found[1]


@pytest.mark.parametrize("name", ["karhunen", "kivi", "int4"])
def test_pages_of_vectors_on_a_device_are_those_of_the_host(name: str, device: FakeDevice) -> None:
    made, x = codec(name), cached(SMALL, 1, 64)
    pages = PageCodec(made, torch.float32)
    here, there = {0: (x[0][0], x[1][0])}, {0: tuple(side[0].to(device.device) for side in x)}
    at = torch.arange(64)
    assert pages.encode_pages(there, at, 32) == pages.encode_pages(here, at, 32)  # type: ignore[arg-type]


def test_beams_are_reordered_by_one_question(device: FakeDevice) -> None:
    model = moved(device, "llama")
    held = CompressedCache(model, fitted("llama", "karhunen"))
    run(model, tokens(3, N_PROMPT).to(device.device), held)
    device.waits.clear()
    held.reorder_cache(torch.tensor([2, 0, 0]).to(device.device))
    assert len([wait for wait in device.waits if "cuda to cpu" in wait]) == 1


def test_tables_are_placed_once_for_a_device(device: FakeDevice) -> None:
    made = codec("karhunen").layers[0]
    moved = made.to(device.device)
    assert moved is made.to(device.device)
    assert moved.to(torch.device("cpu")) is made.to(torch.device("cpu"))
    assert device_of(moved.key) == device_of(moved.value) == device.device
    assert codec("karhunen").to(device.device).fingerprint() == codec("karhunen").fingerprint()


def test_vectors_and_tables_on_two_devices_are_refused(device: FakeDevice) -> None:
    x = cached(SMALL, 1, 8)[0].to(device.device)
    with pytest.raises(ValueError, match=r"on cuda:0, the codec's tables on cpu; use codec\.to\(cuda:0\)"):
        codec("karhunen").layers[0].key.encode(x, torch.arange(8, device=device.device)[None])


def test_a_device_without_float64_is_coded_and_decoded_on_the_host() -> None:
    made, x = codec("karhunen"), cached(SMALL, 2, 70)
    with torch.no_grad(), fake_device(float64=False) as device:
        ours, theirs = (filled(made.layers[0], made.window, y, 33) for y in (there(device, x), x))
        assert all(torch.equal(a, b) for a, b in zip(bits(ours), bits(theirs), strict=True))
        assert_near(ours.read()[0].cpu(), theirs.read()[0], TOLERANCE)
        reader = reader_of(made.layers[0], ours.snapshot())
        assert reader.description == "decoded (cuda has no float64, so vectors are decoded on the host)"


def test_the_reader_says_which_path_and_why(device: FakeDevice) -> None:
    recipe = FROM_BYTES["karhunen"]
    store = filled(codec_of(recipe), recipe.window, there(device, cached(SMALL, 1, 90)))
    reader = reader_of(codec_of(recipe), store.snapshot())
    assert reader.description == "bytes, naive path (forced)"


def test_an_op_without_a_kernel_for_a_device_says_so() -> None:
    assert available("exact_attention", "gpu") == (False, "no GPU kernel is written for exact_attention")
    with forced("gpu"):
        assert fastest("exact_attention", "cpu") == ("naive", "no GPU kernel is written for exact_attention")
        assert fastest("byte_decode", "cpu") == ("gpu", "forced")
    with pytest.raises(ValueError, match="path='fast' is unknown"), forced("fast"):
        pass


# models


@cache
def plain(family: str) -> Any:
    model = build(family)
    enable(model)
    return model


def moved(device: FakeDevice, family: str, **to: Any) -> Any:
    model = device.model(build(family).to(**to) if to else build(family))
    if family == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # others ask for kernels that only a real device has
    enable(model)
    return model


FAMILIES = ("llama", "gemma3", "gpt_oss")
MIXED = {("karhunen", "llama"), ("kivi", "gemma3"), ("karhunen", "gpt_oss")}


@pytest.mark.parametrize(
    ("name", "family"),
    [pytest.param(*each, marks=() if each in MIXED else pytest.mark.long)
     for each in product(("karhunen", "kivi"), FAMILIES)],
)  # fmt: skip
def test_a_model_generates_the_same_tokens(family: str, name: str, device: FakeDevice) -> None:
    made = fitted(family, name)
    there, here = moved(device, family), plain(family)
    prompt = tokens(2, N_PROMPT)
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    for settings in ({"attention_mask": mask}, {"num_beams": 2}) if name == "karhunen" else ({},):
        given = {k: v.to(device.device) if isinstance(v, Tensor) else v for k, v in settings.items()}
        ours = CompressedCache(there, made)
        found = generate(there, prompt.to(device.device), ours, **given)
        assert found == generate(here, prompt, CompressedCache(here, made), **settings)
        coded = [row for row in ours.report().layers if row.n_coded]
        assert coded
        assert all("path (forced)" in row.how_read or "coefficients" in row.how_read for row in coded)


def test_each_layer_of_a_spread_model_has_its_tables_where_it_is(device: FakeDevice) -> None:
    model, made = model_of("llama"), fitted("llama", "karhunen")
    seen = updates(model, tokens(1, 60))
    spread, whole = CompressedCache(model, made), CompressedCache(model, made)
    for i, to in enumerate((torch.device("cpu"), device.device)):
        spread.update(*(x.to(to) for x in seen[i]), i)
        whole.update(*seen[i], i)
    stores = [layer.store for layer in spread.coded_layers()]
    assert [device_of(store.codec) for store in stores] == [torch.device("cpu"), device.device]
    for store, other in zip(stores, whole.coded_layers(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bits(store), bits(other.store), strict=True))


def test_a_session_is_restored_where_each_layer_is(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose second layer lies on another device; who it is was asked before that."""
    monkeypatch.setattr("karhunen.hf.session.weights_fingerprint", lambda model: "by address, of which there is none")
    held = CompressedCache(plain("llama"), fitted("llama", "karhunen"))
    run(plain("llama"), tokens(1, 60), held)
    held.save(tmp_path / "session")
    spread = build("llama")
    with identity_held(spread):
        device.model(spread.model.layers[1])
        found = CompressedCache.load(spread, tmp_path / "session").coded_layers()
    places = [{x.device for x in layer.store.tensors().values()} for layer in found]
    assert places == [{torch.device("cpu")}, {device.device}]
    for layer, other in zip(found, held.coded_layers(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bits(layer.store), bits(other.store), strict=True))


def test_several_turns_and_a_crop(device: FakeDevice) -> None:
    found = []
    for model in (moved(device, "llama"), plain("llama")):
        to = next(model.parameters()).device
        held = CompressedCache(model, fitted("llama", "karhunen"))
        out = [run(model, tokens(1, n, seed=n).to(to), held) for n in (N_PROMPT, 1, 7)]
        held.crop(-11)
        out += [run(model, tokens(1, n, seed=n).to(to), held) for n in (1, 20, 1)]
        held.batch_repeat_interleave(2)
        out.append(run(model, tokens(2, 1).to(to), held)[:1])
        found.append(torch.cat([x.cpu() for x in out], dim=1))
    assert_near(found[0], found[1], 1e-5)


@pytest.mark.parametrize("recipe", ["karhunen", "spectra:bits=6", "kvquant"])
def test_calibration_gives_the_codec_of_the_host(recipe: str) -> None:
    """Gradients, moments, samples and projections, gathered there and fitted here."""
    made, text = make(recipe), tokens(1, 300)[0].tolist()
    here = fit(made, calibrate(build("llama"), [text], made.needs(), min_tokens=16))
    with fake_device() as device:
        there = fit(made, calibrate(device.model(build("llama")), [text], made.needs(), min_tokens=16))
    assert there.fingerprint() == here.fingerprint()


def test_attention_error_is_measured_there(device: FakeDevice) -> None:
    made = fitted("llama", "karhunen")
    models = device.model(build("llama")), model_of("llama")
    found = [attention_errors(made, capture(model, tokens(1, 60)[0], n_queries=8)) for model in models]
    for ours, theirs in zip(*found, strict=True):
        assert ours.output_error == pytest.approx(theirs.output_error, rel=1e-4)


@pytest.mark.parametrize(("name", "attention"), [("karhunen", "karhunen"), ("kivi", "karhunen"), ("karhunen", "sdpa")])
def test_no_float32_copy_of_a_bfloat16_cache_is_made(
    name: str, attention: str, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest float32 tensor of a step is as large after 160 tokens as after 480."""
    monkeypatch.setattr(fused, "CHUNK_TOKENS", 32)
    monkeypatch.setattr(snapshot, "DECODE_TOKENS", 32)
    model, made = moved(device, "llama", dtype=torch.bfloat16), fitted("llama", name)
    model.set_attn_implementation(attention)
    widest = []
    for n in (160, 480):
        held = CompressedCache(model, made)
        run(model, tokens(1, n).to(device.device), held)
        run(model, tokens(1, 1).to(device.device), held)
        device.widest = 0
        run(model, tokens(1, 1).to(device.device), held)
        widest.append(device.widest)
        assert held.get_seq_length() * 24 * 4 > device.widest or n == 160
    assert widest[0] == widest[1] > 0
