"""What the two seeds ask of calibration beyond keys, values and queries, against the model's own tensors."""

from typing import Any

import pytest
import torch
from tests.closeness import LAYERS, SUM, assert_near
from tests.hf.tiny import build
from torch import Tensor

from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.measure import measure
from karhunen.hf.capture import Observation, capturing
from karhunen.hf.rotary import detect_rotary
from karhunen.recipe import Recipe, Side
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.statistics.projection import Projection
from karhunen.transforms.attended import AttendedAxes
from karhunen.transforms.spectra_latent import activations_need, projection_need

T = 40
TOKENS = torch.randint(1, 99, (1, T), generator=torch.Generator().manual_seed(1))


def observe(model: Any, hook_on: str = "", layer: int = 0) -> tuple[list[Observation], Tensor]:
    """Observations of one forward, and what went into a module of one layer's attention meanwhile."""
    seen: list[Observation] = []
    inputs: list[Tensor] = [torch.empty(0)]
    module = getattr(model.model.layers[layer].self_attn, hook_on) if hook_on else model
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]) if hook_on else None)
    with capturing(model, seen.append) as run:
        run(TOKENS, None)
    handle.remove()
    return seen, inputs[-1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_activations_are_what_the_projections_read(family: str) -> None:
    model = build(family)
    seen, hidden = observe(model, "k_proj")
    found = measure(activations_need(Need("moments", "key", skip_tokens=3)), seen[0], None)
    expected = Moments.of(hidden[:, 3:])
    assert isinstance(found, Moments)
    torch.testing.assert_close(found.outer, expected.outer)
    torch.testing.assert_close(found.sum, expected.sum)


def biased(model: Any) -> None:
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            torch.nn.init.normal_(getattr(layer.self_attn, name).bias)


@pytest.mark.parametrize("slot", ["key", "value"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_projection_makes_what_the_layer_caches(family: str, slot: Any) -> None:
    model = build(family)
    if family == "qwen2":
        biased(model)
    seen, hidden = observe(model, "k_proj")
    rotary = detect_rotary(model)[0].key if slot == "key" else None
    found = measure(projection_need(Need("moments", slot)), seen[0], rotary)
    assert isinstance(found, Projection)
    made = hidden[0].double() @ found.weight.double() + found.bias.double()
    layer = getattr(model.model.layers[0].self_attn, f"{slot[0]}_proj")
    assert_near(made, layer(hidden[0]), SUM)
    assert bool(found.bias.any()) == (family == "qwen2")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_keys_behind_a_norm_are_refused_and_values_are_not(family: str) -> None:
    model = build(family)
    seen, _ = observe(model)
    rotary = detect_rotary(model)[0].key
    with pytest.raises(ValueError, match=r"there is a norm in between, as in QK-norm models; use the KLT"):
        measure(projection_need(Need("moments", "key")), seen[0], rotary)
    assert isinstance(measure(projection_need(Need("moments", "value")), seen[0], None), Projection)


def test_a_module_without_a_plain_projection_is_refused() -> None:
    model = build("phi3")  # one projection for queries, keys and values
    seen: list[Observation] = []
    with capturing(model, seen.append) as run:
        run(TOKENS, None)
    with pytest.raises(ValueError, match="has no plain projection to the values; use the KLT"):
        measure(projection_need(Need("moments", "value")), seen[0], None)


def in_groups(model: Any, outputs: Tensor) -> Tensor:
    """Pre-W_O vectors [1 t q·e] as [h, q·t, e]."""
    config = model.config
    heads = outputs[0].unflatten(-1, (config.num_attention_heads, -1)).transpose(0, 1)
    return heads.unflatten(0, (config.num_key_value_heads, -1)).flatten(1, 2)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_outputs_are_the_vectors_that_the_output_projection_reads(family: str) -> None:
    """VᵀSᵀSV: second moments of attention's outputs over all rows and the group's query heads."""
    model = build(family)
    seen, outputs = observe(model, "o_proj")
    found = measure(Need("outputs", "value"), seen[0], None)
    expected = Moments.of(in_groups(model, outputs))
    assert isinstance(found, Moments)
    assert_near(found.second_moment, expected.second_moment, LAYERS)


def test_the_shipped_weight_of_a_value_is_its_key_in_the_query_metric() -> None:
    """w_n = k_n Σ_Q k_nᵀ, Σ_Q summed over the group's query heads and averaged over rows."""
    model = build("llama")
    seen = observe(model)[0][0]
    assert seen.attention is not None
    found = measure(Need("attended", "value", weighting="scores"), seen, None)
    query = (seen.attention.query[0] * seen.attention.scale).unflatten(0, (2, -1)).flatten(1, 2).double()
    metric = query.mT @ query / T
    key, value = seen.key[0].double(), seen.value[0].double()
    expected = Moments.of(value, ((key @ metric) * key).sum(-1))
    assert isinstance(found, Moments)
    assert_near(found.outer, expected.outer, LAYERS)


@pytest.mark.parametrize("source", ["outputs", "received", "scores"])
def test_calibration_gathers_what_the_value_axes_ask_for(source: Any) -> None:
    recipe = Recipe("values", Side(), Side(transform=AttendedAxes(source)))
    text = torch.randint(1, 99, (2, 200), generator=torch.Generator().manual_seed(2))
    statistics = calibrate(build("llama"), text, recipe.needs())
    assert all(recipe.needs() <= layer.measured.keys() for layer in statistics.layers.values())
    more = statistics + statistics
    need = next(iter(AttendedAxes(source).needs(recipe.about("value"))))
    once, twice = (found.layers[0].get(need, Moments) for found in (statistics, more))
    torch.testing.assert_close(twice.second_moment, once.second_moment)


def test_weights_are_gathered_once() -> None:
    """A projection does not add up: the same weights of two texts are the weights."""
    need = projection_need(Need("moments", "value"))
    text = torch.randint(1, 99, (2, 200), generator=torch.Generator().manual_seed(2))
    statistics = calibrate(build("llama"), text, [need])
    once, twice = (found.layers[1].get(need, Projection).weight for found in (statistics, statistics + statistics))
    assert torch.equal(once, twice)
