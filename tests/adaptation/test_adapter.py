"""A stream's statistics by their formula; epochs: new caches get the new codec, old ones are read with their own."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.tiny import build
from tests.synthetic import SMALL, cached, measure, quick, rotary, statistics

from karhunen.adaptation.adapter import GROUP_TOKENS, Adapter
from karhunen.adaptation.forgetting import Forgetting, Stream, faded
from karhunen.calibration.calibrate import calibrate
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument
from karhunen.recipe import Recipe
from karhunen.recipes import make
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.statistics.samples import Samples
from karhunen.store.layer_store import LayerStore

HALF_LIFE = 200
CALIBRATION = 50  # tokens that it counts for; it was measured on 300
FORGETTING = Forgetting(HALF_LIFE, CALIBRATION)
ROUNDING = 1e-6  # of float32 vectors, summed in float64


def of(stream: Stream, need: Need) -> Any:
    return stream.statistics().layers[0].measured[need]


@pytest.fixture(scope="module")
def known() -> tuple[Recipe, Statistics]:
    asked = quick(make("karhunen:bits=3"))
    return asked, statistics(asked, SMALL)


def test_it_fades_to_half_in_a_half_life() -> None:
    x = torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(0))
    faded_by = FORGETTING.moments(Moments.of(x), faded(Moments.of(x), 0.0), HALF_LIFE)
    assert_near(faded_by.outer, Moments.of(x).outer / 2, ROUNDING)
    assert_near(faded_by.mean, Moments.of(x).mean, ROUNDING)


def test_moments_are_the_sum_of_all_vectors_by_their_age(known: tuple[Recipe, Statistics]) -> None:
    asked, calibration = known
    stream = Stream(asked, calibration, FORGETTING)
    need = asked.about("value")
    begun = calibration.layers[0].measured[need]
    assert isinstance(begun, Moments)
    parts = [cached(SMALL, 1, n, seed=9 + n) for n in (40, 64)]
    for key, value in parts:
        stream.add(0, key, value, torch.arange(key.shape[2])[None])
    wanted = begun.outer * CALIBRATION / 300
    for (_, value), age in zip(parts, (64, 0), strict=True):
        wanted = wanted + 2 ** (-age / HALF_LIFE) * torch.einsum("htd,hte->hde", value[0].double(), value[0].double())
    assert_near(of(stream, need).outer, wanted, ROUNDING)


def test_keys_are_measured_in_the_frame_that_they_are_coded_in(known: tuple[Recipe, Statistics]) -> None:
    asked, calibration = known
    stream, need = Stream(asked, calibration, FORGETTING), asked.about("key")
    before = of(stream, need)
    key, value = cached(SMALL, 1, 50, seed=3)
    where = torch.arange(100, 150)[None]
    stream.add(0, key, value, where)
    inside = RopeFrame(need.block_tokens).forward(key, where, rotary(SMALL.key_dim))[0]
    wanted = before.outer * CALIBRATION / 300 + Moments.of(inside).outer
    assert_near(of(stream, need).outer, wanted, ROUNDING)


def test_samples_of_calibration_stay_and_the_others_are_replaced_as_moments_fade(
    known: tuple[Recipe, Statistics],
) -> None:
    asked, calibration = known
    stream = Stream(asked, calibration, FORGETTING)
    need = next(need for need in stream.needs if need.kind == "samples" and need.slot == "value")
    own = calibration.layers[0].measured[need]
    assert isinstance(own, Samples)
    n_own = own.vectors.shape[1]
    texts = [cached(SMALL, 1, n, seed=4 + n) for n in (2 * n_own, HALF_LIFE)]
    for key, value in texts:
        stream.add(0, key, value, torch.arange(key.shape[2])[None])
    held = of(stream, need).vectors
    assert torch.equal(held[:, :n_own], own.vectors)
    assert held.shape[1] == 2 * n_own
    first, second = ((held[0, n_own:, None] == value[0, 0].float()).all(-1).any(-1) for _, value in texts)
    assert int(first.sum()) == round(n_own / 2)
    assert int(second.sum()) == n_own - round(n_own / 2)


def test_padding_counts_nowhere(known: tuple[Recipe, Statistics]) -> None:
    asked, calibration = known
    key, value = cached(SMALL, 1, 40, seed=5)
    plain, padded = (Stream(asked, calibration, FORGETTING) for _ in range(2))
    plain.add(0, key, value, torch.arange(40)[None])
    noise = torch.full((1, 2, 7, 32), 1e3)
    where = torch.cat([torch.arange(-7, 0), torch.arange(40)])[None]
    padded.add(0, torch.cat([noise, key], 2), torch.cat([noise, value], 2), where)
    for need in plain.needs:
        if need.kind == "moments":
            assert_near(of(padded, need).outer, of(plain, need).outer, ROUNDING)


def test_what_takes_gradients_stays_as_it_was_stored(known: tuple[Recipe, Statistics]) -> None:
    asked, calibration = known
    stream = Stream(asked, calibration, FORGETTING)
    key, value = cached(SMALL, 1, 100, seed=6)
    stream.add(0, key, value, torch.arange(100)[None])
    stored = {need for need in asked.needs() if need.kind not in ("moments", "samples")}
    assert stored
    for need in stored:
        assert of(stream, need) is calibration.layers[0].measured[need]


def test_another_kind_of_text_drifts_and_a_fit_brings_it_back(known: tuple[Recipe, Statistics]) -> None:
    asked, calibration = known
    adapter = Adapter(asked, calibration, forgetting=FORGETTING, threshold=1.2)
    begun = adapter.total_drift()
    key, value = cached(SMALL, 1, 300, seed=50)  # as calibration's own
    adapter.add(0, key, value, torch.arange(300)[None])
    stationary = adapter.total_drift()
    assert 1 <= begun < 1.2
    assert 1 <= stationary < 1.2
    assert adapter.adapt() is None
    mix = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(2)))[0]
    for seed in range(4):
        key, value = cached(SMALL, 1, 300, seed=60 + seed)
        adapter.add(0, key @ mix, value @ mix, torch.arange(300)[None])
    drifted = adapter.total_drift()
    assert drifted > 2
    first = adapter.codec
    new = adapter.adapt()
    assert new is adapter.codec is not first
    assert adapter.epoch == 1
    assert adapter.total_drift() < 1.3
    assert adapter.codec_of(first.fingerprint()) is first
    with pytest.raises(ValueError, match="none of 2 epochs"):
        adapter.codec_of("0" * 16)
    x, where = value @ mix, torch.arange(300)[None]
    errors = [float((c.layers[0].value.distort(x, where) - x).square().sum()) for c in (first, new)]
    assert errors[1] < errors[0]


def cost(codec: Codec, x: torch.Tensor) -> float:
    """Of the values' error, in the metric that the codec's transform is orthogonal in."""
    side, where = codec.layers[0].value, torch.arange(x.shape[2])[None]
    metric = side.transform.matrix.double() @ side.transform.matrix.double().mT
    error = (side.distort(x, where) - x)[0].double()
    return float(torch.einsum("htd,hde,hte->", error, metric, error))


def test_adapting_wins_most_of_what_a_codec_of_the_new_text_would_and_costs_nothing_on_the_old(
    known: tuple[Recipe, Statistics],
) -> None:
    """Fresh: all of calibration on the new text but the metric, which is a property of the model."""
    asked, calibration = known
    mix = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(2)))[0]
    new = cached(SMALL, 1, 2000, seed=70)
    turn = rotary(SMALL.key_dim)
    measured = {need: measure(need, SMALL, *(x @ mix for x in new), turn) for need in asked.needs()}
    stored = calibration.layers[0].measured
    own = {need: (found if need.kind in ("moments", "samples") else stored[need]) for need, found in measured.items()}
    fresh = fit(asked, replace(calibration, layers={0: replace(calibration.layers[0], n_tokens=2000, measured=own)}))
    scored = {"old": cached(SMALL, 1, 500, seed=90)[1], "new": cached(SMALL, 1, 500, seed=91)[1] @ mix}
    fixed = fit(asked, calibration)
    adapted = {}
    for text, turning in (("old", torch.eye(32)), ("new", mix)):
        adapter = Adapter(asked, calibration, forgetting=FORGETTING)
        for seed in range(4):
            key, value = (x @ turning for x in cached(SMALL, 1, 250, seed=80 + seed))
            adapter.add(0, key, value, torch.arange(250)[None])
        adapted[text] = adapter.refit()
    lost = cost(fixed, scored["new"]) - cost(fresh, scored["new"])
    assert lost > 0.2 * cost(fixed, scored["new"]), "there is something to win"
    assert cost(fixed, scored["new"]) - cost(adapted["new"], scored["new"]) > 0.5 * lost
    assert cost(adapted["old"], scored["old"]) < 1.1 * cost(fixed, scored["old"])


def test_a_cache_keeps_its_codec_and_what_leaves_it_is_learned() -> None:
    model, asked = build("llama"), quick(make("karhunen:bits=3"))
    tokens = torch.arange(600) % 90 + 3
    measured = calibrate(model, tokens, asked.needs(), sequence_tokens=300)
    adapter = Adapter(asked, measured, forgetting=FORGETTING)
    old = CompressedCache(model, adapter.codec)
    adapter.watch(old)
    name = cache_argument(model)
    with torch.no_grad():
        model(input_ids=tokens[None, :400], use_cache=True, **{name: old})
    n_coded = old.coded_layers()[0].store.n_coded
    assert n_coded >= GROUP_TOKENS
    assert adapter.stream.n_new == dict.fromkeys(adapter.codec.layers, n_coded)
    before = [x.clone() for x in old.coded_layers()[0].store.read()]
    first, new = adapter.codec, adapter.refit()
    assert CompressedCache(model, adapter.codec).codec is new
    assert old.codec is first
    assert all(torch.equal(a, b) for a, b in zip(before, old.coded_layers()[0].store.read(), strict=True))
    with torch.no_grad():
        model(input_ids=tokens[None, 400:500], use_cache=True, **{name: old})
    after = old.coded_layers()[0].store.read()
    assert torch.equal(after[0][:, :, :n_coded], before[0][:, :, :n_coded]), "never coded again"
    assert not old.branch().coded_layers()[0].store.observers
    old.close()


def test_what_makes_no_sense_is_refused(known: tuple[Recipe, Statistics]) -> None:
    asked, calibration = known
    with pytest.raises(ValueError, match="half_life_tokens=0"):
        Forgetting(0)
    with pytest.raises(ValueError, match="calibration_tokens=0"):
        Forgetting(calibration_tokens=0)
    for threshold in (0.5, math.nan):
        with pytest.raises(ValueError, match="threshold"):
            Adapter(asked, calibration, threshold=threshold)
    plain = quick(make("int8"))
    with pytest.raises(ValueError, match="nothing to adapt"):
        Stream(plain, statistics(plain, SMALL))


def test_a_store_without_observers_is_as_before(known: tuple[Recipe, Statistics]) -> None:
    asked, calibration = known
    codec = fit(asked, calibration)
    assert LayerStore(codec.layers[0], asked.window).observers == ()
