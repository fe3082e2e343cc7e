"""The closed-form correction of W_O: least squares on what it saw, an improvement on what it did not."""

from dataclasses import replace

import pytest
import torch
from tests.closeness import LAYERS, SUM, assert_near
from tests.hf.tiny import build
from tests.synthetic import seeded

from karhunen.allocation.uniform import Uniform
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.output_correction import correct_outputs, corrections, measure_outputs
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.output_weights import bake, output_weights, with_output_weights
from karhunen.hf.probe import cache_argument
from karhunen.quantizers.affine import Affine
from karhunen.recipe import Recipe, Side
from karhunen.statistics.outputs import OutputPairs, best_corrected_weight, corrected_weight
from karhunen.windows.sink_recent import SinkRecent

WINDOW = SinkRecent(sink=2, recent=6, page_tokens=4)
COARSE = Recipe("coarse", Side(allocation=Uniform(2), quantizer=Affine()), Side(allocation=Uniform(1)), WINDOW)
LENGTH, SEQUENCES = 120, 10


def ids(n: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 99, (n, LENGTH), generator=seeded(seed))


def coarse(model: torch.nn.Module, recipe: Recipe = COARSE) -> Codec:
    return fit(recipe, calibrate(model, ids(3, 0), recipe.needs()))


def pairs(n: int = 200, width: int = 12) -> OutputPairs:
    dense = torch.randn(n, width, generator=seeded(1))
    return OutputPairs.of(dense + 0.3 * torch.randn(n, width, generator=seeded(2)).abs(), dense)


def test_the_correction_solves_the_normal_equations() -> None:
    """As the ridge goes to nothing, E[a′ᵀa′] W′ = E[a′ᵀa] W: no other W′ does better on these rows."""
    weight = torch.randn(7, 12, generator=seeded(3)).double()
    found = pairs()
    for towards in (True, False):
        new = corrected_weight(weight, found, 1e-12, towards)
        assert_near(found.gram @ new.mT, found.cross @ weight.mT, 1e-9)  # a ridge of 1e-12 and its condition
        best = found.error(new, weight)
        assert best < found.error(weight, weight)
        assert best <= found.error(new + 1e-3 * torch.randn(7, 12, generator=seeded(4)), weight)


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 10.0])
def test_without_an_error_there_is_no_correction(ridge: float) -> None:
    dense = torch.randn(50, 12, generator=seeded(1))
    weight = torch.randn(7, 12, generator=seeded(3))
    assert_near(corrected_weight(weight, OutputPairs.of(dense, dense), ridge), weight, SUM)


def test_a_large_ridge_pulls_to_the_weight_or_to_zero() -> None:
    weight = torch.randn(7, 12, generator=seeded(3))
    assert_near(corrected_weight(weight, pairs(), 1e9), weight, 1e-4)  # what a ridge of 1e9 leaves
    assert corrected_weight(weight, pairs(), 1e9, towards_weight=False).abs().max() < 1e-4


def test_held_out_text_chooses_the_ridge_or_none_at_all() -> None:
    """Of twelve inputs, five hundred rows deserve a small ridge; five rows of the same kind deserve none of it."""
    weight = torch.randn(7, 12, generator=seeded(3))
    held_out, own = pairs(400), pairs(400).error(weight, weight)
    best = best_corrected_weight(weight, pairs(500), held_out)
    assert held_out.error(best, weight) < 0.9 * own
    dense = torch.randn(5, 12, generator=seeded(6))
    noise = OutputPairs.of(dense + torch.randn(5, 12, generator=seeded(7)), dense)
    assert held_out.error(best_corrected_weight(weight, noise, held_out), weight) <= own
    exact = OutputPairs.of(dense, dense)
    assert torch.equal(best_corrected_weight(weight, noise, exact), weight)


def test_a_ridge_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="ridge=0 leaves unused directions undetermined; use a positive one"):
        corrected_weight(torch.zeros(7, 12), pairs(), 0)


def test_pairs_of_two_texts_are_those_of_both() -> None:
    a, b = torch.randn(9, 4, generator=seeded(1)), torch.randn(9, 4, generator=seeded(2))
    whole, parts = OutputPairs.of(a, b), OutputPairs.of(a[:3], b[:3]) + OutputPairs.of(a[3:], b[3:])
    assert whole.count == parts.count == 9
    for name in ("gram", "cross", "dense"):
        assert torch.allclose(getattr(whole, name), getattr(parts, name))


def test_the_measured_vectors_are_those_of_the_compressed_cache() -> None:
    """Token by token through the cache, the first layer's pre-W_O vectors sum to the gram that was measured."""
    model, tokens = build("llama"), ids(1, 5)
    codec = coarse(model)
    found = measure_outputs(model, codec, tokens)[0]
    rows: list[torch.Tensor] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: rows.append(args[0][0]))
    cache = CompressedCache(model, codec)
    with torch.no_grad():
        for n in range(LENGTH):
            model(input_ids=tokens[:, n : n + 1], use_cache=True, **{cache_argument(model): cache})
    handle.remove()
    seen = torch.cat(rows)[LENGTH - found.count :].double()
    assert 0 < found.count < LENGTH
    assert_near(seen.mT @ seen, found.gram, LAYERS)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_correction_helps_on_text_it_never_saw(family: str) -> None:
    model = build(family)
    codec = coarse(model)
    weights = corrections(model, measure_outputs(model, codec, ids(SEQUENCES, 1)))
    own = output_weights(model, {layer: weight.shape[1] for layer, weight in weights.items()})
    for layer, fresh in measure_outputs(model, codec, ids(3, 2)).items():
        assert fresh.error(weights[layer], own[layer]) < 0.97 * fresh.error(own[layer], own[layer])


def test_a_correction_chosen_by_held_out_text_harms_no_layer_of_other_text() -> None:
    model = build("llama")
    codec = coarse(model)
    told: list[tuple[int, int]] = []
    texts = [*ids(7, 1).tolist(), ids(1, 2)[0, :50].tolist()]  # the last is shorter than the others
    weights = correct_outputs(model, codec, texts, progress=lambda done, total: told.append((done, total)))
    n_tokens = 7 * LENGTH + 50
    assert [total for _, total in told] == 8 * [n_tokens]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (n_tokens, n_tokens)
    own = output_weights(model, {layer: weight.shape[1] for layer, weight in weights.items()})
    for layer, fresh in measure_outputs(model, codec, ids(3, 2)).items():
        assert fresh.error(weights[layer], own[layer]) <= 1.01 * fresh.error(own[layer], own[layer])
    with pytest.raises(ValueError, match="one sequence of text cannot both fit and judge a correction"):
        correct_outputs(model, codec, ids(1, 1))


def test_only_the_sides_named_are_coded() -> None:
    model = build("llama")
    codec, tokens = coarse(model), ids(1, 1)
    errors = [
        [found.error(w := output_weights(model, {i: 48})[i], w) for i, found in measured.items()]
        for measured in (
            measure_outputs(model, codec, tokens, coded=slots) for slots in ((), ("value",), ("key", "value"))
        )
    ]
    assert max(errors[0]) < 1e-10
    assert all(0 < value < both for value, both in zip(errors[1], errors[2], strict=True))


def test_the_model_is_bit_for_bit_as_before_after_the_context() -> None:
    model = build("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {0: torch.zeros(48, 48)}

    def fail_inside() -> None:
        with with_output_weights(model, weights):
            assert not model.model.layers[0].self_attn.o_proj.weight.any()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_codec_is_accepted_while_its_model_is_corrected() -> None:
    model = build("llama")
    codec = coarse(model)
    with with_output_weights(model, {1: torch.zeros(48, 48)}):
        CompressedCache(model, codec).close()


def test_baked_weights_stay() -> None:
    model = build("llama")
    bake(model, {1: torch.ones(48, 48)})
    assert bool((output_weights(model, {1: 48})[1] == 1).all())


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 1: W_O is"):
        bake(build("llama"), {1: torch.ones(3, 48)})


def test_sequences_that_never_leave_the_window_are_refused() -> None:
    model = build("llama")
    codec = coarse(model, replace(COARSE, window=SinkRecent(4, 5000)))
    with pytest.raises(ValueError, match="no row of a sequence of 512 tokens reads a coded one"):
        measure_outputs(model, codec, ids(1, 1))
