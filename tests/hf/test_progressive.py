"""A progressive cache in a model: read from bytes as decoded, decided alike, shrunk while it is in use."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.closeness import LAYERS, assert_near
from tests.hf.tiny import build
from tests.progressive import recipe
from tests.synthetic import seeded, statistics
from torch import Tensor

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.hf.attention import enable
from karhunen.hf.cache import CompressedCache
from karhunen.hf.describe import identity_of
from karhunen.kernels.paths import forced
from karhunen.packing.bit_fields import BitFields
from karhunen.pages import PageCodec
from karhunen.store.layer_store import LayerStore
from karhunen.store.refined_state import RefinedState
from karhunen.store.refinements import Refinements

PROMPT, CHUNK, STEPS = 70, 24, 6
SAYS = {"sdpa": "decoded", "karhunen": "bytes"}


@pytest.fixture(scope="module")
def made() -> Codec:
    model = identity_of(build("llama"))
    return fit(recipe(), replace(statistics(recipe(), *model.layers), model=model))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 99, (2, PROMPT + CHUNK + STEPS), generator=seeded(4))


def run(made: Codec, ids: Tensor, attention: str, padding: int = 0, **options: Any) -> tuple[Tensor, CompressedCache]:
    """A prompt, a chunk, and single steps; the second row is padded on the left."""
    model = build("llama")
    if attention == "karhunen":
        enable(model)
    cache = CompressedCache(model, made, **options)
    mask = torch.ones_like(ids)
    mask[1:, :padding] = 0
    edges = [0, PROMPT, PROMPT + CHUNK, *range(PROMPT + CHUNK + 1, ids.shape[1] + 1)]
    out: list[Tensor] = []
    with torch.inference_mode(), forced("naive"):
        for start, stop in pairwise(edges):
            at = (mask.cumsum(1) - 1).clamp_min(0)[:, start:stop]
            asked = {"attention_mask": mask[:, :stop], "position_ids": at} if padding else {}
            out.append(model(ids[:, start:stop], cache=cache, **asked).logits[:, -1])
    return torch.stack(out), cache


def heat(cache: CompressedCache) -> list[Tensor]:
    held = [refinements.held() for refinements in refined(cache)]
    return [each.heat for each in held if each is not None]


def refined(cache: CompressedCache) -> list[Refinements]:
    return [layer.store.refinements for layer in cache.coded_layers() if layer.store.refinements is not None]


@pytest.mark.parametrize("padding", [0, 30])
def test_bytes_are_read_as_decoded_tokens_are_and_classes_decided_alike(made: Codec, ids: Tensor, padding: int) -> None:
    want, decoded = run(made, ids, "sdpa", padding)
    got, read = run(made, ids, "karhunen", padding)
    for cache, attention in ((decoded, "sdpa"), (read, "karhunen")):
        assert cache.coded_layers()[1].how_read.startswith(SAYS[attention])
        assert cache.coded_layers()[1].store.n_coded == 80
    assert_near(got, want, LAYERS)
    for x, y in zip(heat(read), heat(decoded), strict=True):
        assert int((x.int() - y.int()).abs().max()) <= 1  # a sum in another order may fall on the other side of a step
        assert len(x.unique()) > 10


def test_a_cache_shrinks_to_its_base_while_it_is_in_use(made: Codec, ids: Tensor) -> None:
    _, cache = run(made, ids, "karhunen")
    before = cache.report().total
    assert cache.shrink(0) == 0
    freed = cache.shrink(300)
    assert freed >= 300
    assert cache.report().total.held == before.held - freed
    model = cache.model
    with torch.inference_mode(), forced("naive"):
        shrunk = model(ids[:, :1], cache=cache).logits
        cache.crop(-1)
        cache.shrink(1 << 40)
        base = model(ids[:, :1], cache=cache).logits
    assert not torch.equal(shrunk, base)
    assert all(int(refinements.classes.sum()) == 0 for refinements in refined(cache))
    assert cache.shrink(1000) == 0  # nothing is left to give


def test_a_cache_keeps_within_its_bytes(made: Codec, ids: Tensor) -> None:
    _, free = run(made, ids, "sdpa")
    _, cache = run(made, ids, "sdpa", max_bytes=1 << 30)
    with torch.inference_mode(), forced("naive"):
        free.model(ids[:, :1], cache=free)
        cache.max_bytes = most = free.report().total.held - 200
        cache.model(ids[:, :1], cache=cache)
    assert most - 200 < cache.report().total.held <= most
    assert sum(int(refinements.classes.sum()) for refinements in refined(cache)) > 0, "no more is given than has to be"


def test_below_its_base_a_cache_says_that_it_grows_on(
    made: Codec, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    _, cache = run(made, ids, "sdpa", max_bytes=1000)
    assert "at their base" in caplog.text
    assert len(caplog.records) == 1
    assert cache.report().total.held > 1000


def test_what_is_not_served_is_refused_before_any_work(made: Codec) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="a page holds tokens of one rate"):
        PageCodec(made)
    with pytest.raises(ValueError, match="max_bytes=0"):
        CompressedCache(model, made, max_bytes=0)


@pytest.mark.parametrize("attention", ["sdpa", "karhunen"])
def test_a_session_goes_on_with_its_layers_and_what_was_paid(
    made: Codec, ids: Tensor, attention: str, tmp_path: Path
) -> None:
    """A cache that has shrunk, written between two steps: later classes too are those of one that never stopped."""
    _, cache = run(made, ids, attention, padding=30)
    cache.shrink(200)
    cache.save(tmp_path / "session")
    restored = CompressedCache.load(cache.model, tmp_path / "session")
    assert restored.report().total == cache.report().total
    more = torch.randint(0, 99, (2, 20), generator=seeded(9))
    with torch.inference_mode(), forced("naive"):
        for at in range(20):
            want, got = (cache.model(more[:, at : at + 1], cache=held).logits for held in (cache, restored))
            assert torch.equal(want, got)
    assert cache.report().total == restored.report().total
    assert sum(int(each.classes.sum()) for each in refined(restored)) > 0
    assert all(torch.equal(x, y) for x, y in zip(heat(cache), heat(restored), strict=True))
    restored.crop(-30)
    assert restored.shrink(1 << 40) > 0
    restored.reorder_cache(torch.tensor([1, 0]))
    assert restored.report().total.refinements == 0


def test_a_damaged_session_is_refused_in_one_line(made: Codec, ids: Tensor) -> None:
    _, cache = run(made, ids, "sdpa")
    store = cache.coded_layers()[0].store
    state, shape = store.state(), made.model.layers[0]
    assert isinstance(state, RefinedState)
    assert state.heat is not None
    for broken, words in (
        (replace(state, heat=state.heat[:, 1:]), "its heat is"),
        (replace(state, heat=state.heat + 16), "its layers are"),
        (replace(state, layers=state.layers[:1]), "its layers are"),
        (replace(state, line=999), "its line of heat is 999"),
        (replace(state, sums=None), "were paid is not there"),
        (state.base, "it has no layers of refinement, and its codec's tokens have them"),
    ):
        with pytest.raises(ValueError, match=words):
            LayerStore.restored(broken, store.codec, store.window, shape)


def test_the_artifact_comes_back_and_is_checked(made: Codec, tmp_path: Any) -> None:
    made.save_pretrained(tmp_path / "codec")
    assert Codec.from_pretrained(tmp_path / "codec").fingerprint() == made.fingerprint()
    layer = made.layers[0]
    quantizer: Any = layer.key.quantizer
    short = replace(quantizer, parts=quantizer.parts[:2])
    key = replace(layer.key, quantizer=short, layout=BitFields(short.widths))
    broken = replace(made, layers={**made.layers, 0: replace(layer, key=key)})
    with pytest.raises(ValueError, match="layer 0: its keys have 1 layers of refinement, its window gives 2"):
        broken.check()
