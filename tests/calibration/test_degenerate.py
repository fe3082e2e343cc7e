"""What is measured of a pruned head, a constant or a short text makes a codec that decodes to numbers, or none."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests import synthetic
from tests.hf.tiny import build
from torch import Tensor

from karhunen import recipes
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.steps import min_gradient_tokens
from karhunen.fitting import fit
from karhunen.hf.capture import Observation, capturing
from karhunen.recipe import Recipe
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS
from karhunen.statistics.samples import Samples

NAMES = ("karhunen", "karhunen:joined=true", "spectra:group=8", "nova_kv", "kvquant", "aatc:group=8", "oscar")
FISHER = ("karhunen", "karhunen:joined=true", "kvquant")
GROUP = slice(0, 12)  # the first of two head groups, and its two query heads
QUERIES = slice(0, 24)


def ids(n: int, t: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 99, (n, t), generator=torch.Generator().manual_seed(seed))


@cache
def recipe(name: str) -> Recipe:
    return synthetic.quick(recipes.make(name))


@torch.no_grad()
def zeroed(part: str) -> Any:
    """A model whose first layer has a head, or all of one projection, at zero."""
    model = build("llama", max_position_embeddings=1024)
    attention = model.model.layers[0].self_attn
    name, which = part.split()
    weight = getattr(attention, f"{name}_proj").weight
    rows = {"layer": slice(None), "head": QUERIES if name in "qo" else GROUP}[which]
    (weight.mT if name == "o" else weight)[rows] = 0
    return model


@cache
def measured(case: str) -> tuple[Any, Statistics]:
    """Everything that the recipes need, in one pass."""
    tokens = torch.full((2, 512), 7) if case == "one token" else ids(4, 512)
    model = build("llama", max_position_embeddings=1024) if case == "one token" else zeroed(case)
    needs = frozenset[Any]().union(*(recipe(name).needs() for name in NAMES))
    return model, calibrate(model, tokens, needs, max_tokens=2048)


CASES = ("o head", "o layer", "v head", "v layer", "q head", "k head", "k layer", "one token")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_degenerate_layer_is_decoded_to_numbers(name: str, case: str) -> None:
    model, statistics = measured(case)
    codec = fit(recipe(name), statistics)  # which refuses tables that hold NaN or infinity
    seen: list[Observation] = []
    with torch.no_grad(), capturing(model, seen.append) as run:
        run(ids(1, 256, seed=5), None)
    assert {observation.layer for observation in seen} == {0, 1}
    for observation in seen:
        for slot in SLOTS:
            x = (observation.key if slot == "key" else observation.value).float()
            y = codec.layers[observation.layer].side(slot).distort(x, torch.arange(256)[None])
            assert bool(y.isfinite().all())
            if case != "one token":  # from which nothing is learned of other texts
                error = float((y - x).square().sum() / x.square().sum().clamp_min(1e-30))
                assert error < (0.6 if observation.layer else 1.001), "never worse than coding nothing"


@pytest.mark.parametrize("name", FISHER)
@pytest.mark.parametrize(("case", "said"), [("o head", "head group 0"), ("o layer", "head groups 0, 1")])
def test_heads_where_an_error_costs_nothing_are_named(name: str, case: str, said: str) -> None:
    notes = fit(recipe(name), measured(case)[1]).origin.notes
    if name == "karhunen:joined=true" and case == "o head":
        assert notes == (), "a vector of joined heads costs something"
        return
    said = "head group 0" if name == "karhunen:joined=true" else said
    assert len(notes) == 2, "keys and values"
    for note, slot in zip(notes, SLOTS, strict=True):
        assert note.startswith(f"layer 0, {slot}s: an error costs nothing in {said} ")


def test_a_healthy_model_has_no_notes() -> None:
    for name in ("karhunen", "nova_kv"):
        statistics = calibrate(build("llama"), ids(2, 512), recipe(name).needs())
        assert fit(recipe(name), statistics).origin.notes == ()


@pytest.mark.parametrize("name", FISHER)
def test_texts_too_short_for_gradients_are_refused_before_anything_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr("karhunen.calibration.calibrate._run", run)
    needs = recipe(name).needs()
    least = min_gradient_tokens(needs)
    for n_tokens in (120, 132, least - 1):
        said = f"one sequence has to have {least} tokens, and the longest of 12 has {n_tokens}; give longer texts"
        with pytest.raises(ValueError, match=said):
            calibrate(build("llama"), ids(12, n_tokens), needs)


@pytest.mark.parametrize("first", [True, False])
def test_one_long_text_among_short_ones_is_where_gradients_are_measured(first: bool) -> None:
    short, long = [row.tolist() for row in ids(12, 100)], ids(1, 400, seed=1).tolist()
    statistics = calibrate(build("llama"), [*long, *short] if first else [*short, *long], recipe("karhunen").needs())
    for layer in statistics.layers.values():
        found = [m for need, m in layer.measured.items() if need.kind == "gradients" and isinstance(m, Moments)]
        assert len(found) == 2
        assert all(bool((moments.outer.diagonal(dim1=-2, dim2=-1) > 0).all()) for moments in found)


def test_gradients_of_zero_everywhere_are_refused_by_fit() -> None:
    """As statistics have them that were saved before short texts were refused."""
    statistics = measured("k head")[1]

    def emptied(need: Any, found: Any) -> Any:
        return Moments(found.count, 0 * found.sum, 0 * found.outer) if need.kind == "gradients" else found

    layers = {
        i: replace(layer, measured={need: emptied(need, found) for need, found in layer.measured.items()})
        for i, layer in statistics.layers.items()
    }
    with pytest.raises(ValueError, match=r"gradients of the .* are zero in every layer, .* longer texts"):
        fit(recipe("karhunen"), replace(statistics, layers=layers))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", recipes.names())
def test_no_recipe_is_fitted_to_what_is_not_a_number(name: str, value: float) -> None:
    made = synthetic.quick(recipes.make(name))
    shape = replace(synthetic.SMALL, key_dim=16, value_dim=16)
    statistics = synthetic.statistics(made, shape)

    def poisoned(found: Any) -> Any:
        if isinstance(found, Moments):
            return Moments(found.count, found.sum + value, found.outer + value)
        return Samples(found.vectors + value, found.positions) if isinstance(found, Samples) else found

    layer = statistics.layers[0]
    bad = replace(layer, measured={need: poisoned(found) for need, found in layer.measured.items()})
    if not any(isinstance(found, Moments | Samples) for found in layer.measured.values()):
        fit(made, replace(statistics, layers={0: bad}))  # nothing measured, nothing that could be wrong
        return
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        fit(made, replace(statistics, layers={0: bad}))
