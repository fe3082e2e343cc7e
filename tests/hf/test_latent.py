"""Latent attention: two slots, of which the one under the name of values turns, coded by what their errors cost."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.hf.cells import brief, ids, shared_model
from tests.hf.tiny import build

from karhunen import recipes
from karhunen.adaptation.forgetting import Stream
from karhunen.attention.reader import Reader
from karhunen.calibration.calibrate import calibrate
from karhunen.codec import Codec
from karhunen.fitting import fit, samples_and_variances
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.cache import CompressedCache, dense_cache
from karhunen.hf.expansion import expanded_layers
from karhunen.hf.probe import cache_argument, updates
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS, Need, Statistic
from karhunen.windows.sink_recent import SinkRecent

FAMILY = "DeepSeek V3"
BLOCK = 16
GRADIENTS = [Need("gradients", slot, skip_tokens=4) for slot in SLOTS]


TEXTS = ("int4", "spectra:bits=6", *(f"karhunen:token_bytes={n},block_tokens={BLOCK}" for n in (24, 56)))
RECIPES = {text: brief(recipes.make(text)) for text in TEXTS}
INT4, SPECTRA, SMALL, OURS = TEXTS  # int4 takes 56 bytes for a token of both layers, spectra 60


@cache
def measured() -> Statistics:
    """What all of the recipes ask for, and what errors cost in no frame, in one pass."""
    needs = {need for recipe in RECIPES.values() for need in recipe.needs()}
    return calibrate(shared_model(FAMILY), ids(2, 400, seed=9), needs | {need.exchanged() for need in GRADIENTS})


@cache
def fitted(text: str) -> Codec:
    return fit(RECIPES[text], measured())


def error_and_bytes(made: Codec) -> tuple[float, int]:
    """Loss of predictions for one token of a text that was not calibrated on, by the gradients; bytes of a token."""
    text, loss, n_bytes = ids(1, 384, seed=77), 0.0, 0
    positions = torch.arange(text.shape[1])[None]
    for layer, cached in updates(shared_model(FAMILY), text).items():
        for need, x in zip(GRADIENTS, cached, strict=True):
            side = made.layers[layer].side(need.slot)
            packed = side.encode(x, positions)
            off = (side.decode(packed, positions) - x).double()[0, 0]
            loss += float(((off @ measured().layers[layer].get(need, Moments).second_moment[0]) * off).sum()) / len(off)
            n_bytes += sum(part.nbytes for part in packed.tensors())
    return loss, round(n_bytes / text.shape[1])


def test_at_equal_bytes_an_error_costs_a_fraction_of_what_it_costs_in_other_recipes() -> None:
    int4, n_bytes = error_and_bytes(fitted(INT4))
    spectra, n_more = error_and_bytes(fitted(SPECTRA))
    ours, n_held = error_and_bytes(fitted(OURS))
    assert (n_held, n_bytes, n_more) == (56, 56, 60)
    assert ours < 0.1 * min(int4, spectra)


def test_the_part_that_turns_is_coded_as_keys_are_whatever_it_is_called() -> None:
    made, recipe = fitted(SMALL), RECIPES[SMALL]
    for layer in made.layers.values():
        assert layer.key.rotary is None
        assert layer.value.rotary is not None
        assert (layer.value.frame, layer.key.frame) == (
            recipe.key and recipe.key.frame,
            recipe.value and recipe.value.frame,
        )
        assert layer.value.mean is not None
        assert layer.exceptions is not None
        assert layer.exceptions.slot == "key", "the latent, which is read as values are"


def test_bits_follow_the_cost_of_an_error_over_both_slots() -> None:
    """One water line through both: where errors in rotary parts cost 256 times as much, bytes move there."""
    found = measured()
    layers = {i: replace(layer, measured=dearer(layer.measured, "value", 256.0)) for i, layer in found.layers.items()}
    usual, moved = fitted(SMALL), fit(RECIPES[SMALL], replace(found, layers=layers))
    for slot, sign in zip(SLOTS, (-1, 1), strict=True):
        before, after = (
            sum(x.side(slot).layout.bytes_per_token for x in made.layers.values()) for made in (usual, moved)
        )
        assert sign * (after - before) >= 2


def dearer(measured: Mapping[Need, Statistic], slot: str, factor: float) -> dict[Need, Statistic]:
    return {
        need: replace(x, outer=factor * x.outer)
        if isinstance(x, Moments) and (need.kind, need.slot) == ("gradients", slot)
        else x
        for need, x in measured.items()
    }


def test_predictions_keep_closer_than_with_int4_at_its_bytes() -> None:
    window = SinkRecent(4, 8)
    int4, ours = (divergence(replace(fitted(text), window=window)) for text in (INT4, OURS))
    assert ours < 0.5 * int4


@torch.no_grad()
def divergence(made: Codec) -> float:
    """Mean KL of some tokens after a prompt, to the dense model."""
    model, text, found = shared_model(FAMILY), ids(1, 140, seed=5), []
    for held in (dense_cache(model), CompressedCache(model, made)):
        for part in (text[:, :80], text[:, 80:110], text[:, 110:]):
            out = model(input_ids=part, use_cache=True, **{cache_argument(model): held}).logits
        found.append(out.double().log_softmax(-1))
    dense, coded = found
    return float((dense.exp() * (dense - coded)).sum(-1).mean())


def test_slots_of_a_layer_are_measured_as_the_cache_has_them() -> None:
    for slot, d in zip(SLOTS, (32, 8), strict=True):
        samples, variances = samples_and_variances(RECIPES[SMALL], measured(), 0, slot)
        assert samples.shape[-1] == variances.shape[-1] == d


def test_what_is_served_is_taken_in_slot_by_slot() -> None:
    """Statistics that forget hold what a recipe needs under the name that the cache has for it."""
    stream = Stream(RECIPES[SMALL], measured())
    text = ids(1, 60, seed=3)
    for layer, (latent, rotary) in updates(shared_model(FAMILY), text).items():
        stream.add(layer, latent, rotary, torch.arange(60)[None])
    before, after = (made.layers[0].value for made in (fitted(SMALL), fit(RECIPES[SMALL], stream.statistics())))
    assert after.frame == before.frame == RopeFrame(BLOCK, center=True)
    assert before.mean is not None
    assert after.mean is not None
    assert not torch.equal(before.mean, after.mean)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", []), ("gpt2", []), ("bloom", []), ("qwen3_next", []), ("mla", [0, 1])]
)
def test_only_layers_that_expand_their_cache_are_called_expanded(family: str, expected: list[int]) -> None:
    assert sorted(expanded_layers(build(family))) == expected


def test_a_value_that_turns_is_not_summed_in_its_coefficients() -> None:
    """As recipes without centering leave it: the sum of turned coefficients is no value."""
    layer = fitted(SPECTRA).layers[0]
    assert layer.value.frame.needs_rotary
    assert layer.value.mean is None
    made = Reader.of(layer, 32, 8)
    assert (made.mode, "frame that turns" in made.reason) == ("decoded", True)
