"""What a window or a frame cannot do for a model is refused before any work, and what it can do is exact."""

import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from tests.closeness import assert_near
from tests.fake_device import fake_device
from tests.hf.tiny import SIZES, build
from torch import Tensor

from karhunen import recipes
from karhunen.calibration.calibrate import calibrate
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.positions import left_padding
from karhunen.hf.probe import cache_argument
from karhunen.hf.suits import reads_distances
from karhunen.store.positions import Offsets
from karhunen.windows.sink_recent import SinkRecent


def random_weights(model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    if family == "mpt":
        config = tf.MptConfig(d_model=48, n_heads=4, n_layers=2, vocab_size=99, max_seq_len=512)
        return random_weights(tf.MptForCausalLM(config))
    if family in ("falcon_alibi", "falcon_one_layer"):
        config = tf.FalconConfig(
            vocab_size=99, hidden_size=48, num_hidden_layers=1 if family == "falcon_one_layer" else 2,
            num_attention_heads=4, alibi=True, new_decoder_architecture=False, multi_query=False,
        )  # fmt: skip
        return random_weights(tf.FalconForCausalLM(config))
    if family == "qwen2_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
        text = {**SIZES, "rope_parameters": rope}
        vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48}
        return random_weights(
            tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(text_config=text, vision_config=vision))
        )
    if family == "cohere2":
        kinds = ["sliding_attention", "full_attention"]
        return random_weights(
            tf.Cohere2ForCausalLM(
                tf.Cohere2Config(**SIZES, sliding_window=16, layer_types=kinds, bos_token_id=1, eos_token_id=2)
            )
        )
    return build(family)


def ids(n: int, b: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 99, (b, n), generator=torch.Generator().manual_seed(seed))


@cache
def codec(family: str, name: str) -> Codec:
    recipe = recipes.make(name)
    if recipe.key is not None:
        recipe = replace(recipe, window=SinkRecent(2, 8, 8))
    return fit(recipe, calibrate(model_of(family), ids(300, 2), recipe.needs()))


def last_logits(family: str, held: Any, tokens: Tensor, **arguments: Any) -> Tensor:
    model = model_of(family)
    with torch.no_grad():
        out = model(input_ids=tokens, use_cache=True, **{cache_argument(model): held}, **arguments)
    return out.logits[:, -1]


DISTANCES = ["bloom", "mpt", "falcon_alibi", "falcon_one_layer"]
OTHERS = ["llama", "gpt2", "mla", "cohere2", "llama4", "gptj", "lfm2"]


@pytest.mark.parametrize("family", [*DISTANCES, *OTHERS])
def test_a_bias_for_distances_is_told_from_positions_in_the_vectors(family: str) -> None:
    assert reads_distances(model_of(family)) == (family in DISTANCES)


@pytest.mark.parametrize("family", ["bloom", "falcon_alibi"])
@pytest.mark.parametrize("name", ["streaming_llm", "key_norm"])
def test_tokens_are_not_dropped_where_distances_are_taken_among_those_left(family: str, name: str) -> None:
    made = codec(family, name)
    with pytest.raises(ValueError, match=r"adds a bias for the distance .* \(ALiBi\), .* drops none, such as nova_kv"):
        CompressedCache(model_of(family), made)
    CompressedCache(model_of(family), codec(family, "int8"))


def test_a_score_by_attention_is_refused_where_attention_expands_the_cache() -> None:
    with pytest.raises(ValueError, match=r"in layer 0 its attention does not read the cached .* use a recipe that"):
        CompressedCache(model_of("mla"), codec("mla", "snapkv:kept=40"))
    CompressedCache(model_of("mla"), codec("mla", "key_norm"))


# positions


def on_a_grid(n: int) -> Tensor:
    """Of an image between words: [3 1 n]."""
    at = torch.arange(n).expand(3, 1, n).clone()
    at[0, 0, 10:26] = 10
    at[1, 0, 10:26] = 10 + torch.arange(16) // 4
    at[2, 0, 10:26] = 10 + torch.arange(16) % 4
    at[:, 0, 26:] = torch.arange(14, 14 + n - 26)
    return at


def test_positions_of_an_image_are_refused_by_a_codec_that_turns_keys() -> None:
    cache = CompressedCache(model_of("qwen2_vl"), codec("qwen2_vl", "spectra:group=4"))
    with pytest.raises(ValueError, match=r"tokens of an image stand at one position in time .* such as nova_kv"):
        last_logits("qwen2_vl", cache, ids(60), position_ids=on_a_grid(60))


def test_a_step_at_several_positions_is_refused_where_it_is_coded_at_one() -> None:
    """On the host at once; on a device when the token is coded, so that no step asks it."""
    step = torch.tensor([9, 3, 4]).view(3, 1, 1)
    with pytest.raises(ValueError, match="tokens of an image stand at one position"):
        left_padding(step, 20, turns=True)
    assert left_padding(step, 20, turns=False) is None
    with fake_device() as device:
        alike = left_padding(torch.full((3, 1, 1), 9).to(device.device), 20, turns=True)
        apart = left_padding(step.to(device.device), 20, turns=True)
        assert alike is not None
        assert apart is not None
        n_waits = len(device.waits)
        first, second = Offsets(alike), Offsets(apart)
        assert len(device.waits) == n_waits
        assert first.known.tolist() == [11]
        with pytest.raises(ValueError, match="tokens of an image stand at one position"):
            Offsets.ask([second])


def test_positions_of_an_image_do_not_matter_to_keys_coded_as_they_are_cached() -> None:
    found: list[Tensor] = []
    for held in (CompressedCache(model_of("qwen2_vl"), codec("qwen2_vl", "int8")), tf.DynamicCache()):
        last_logits("qwen2_vl", held, ids(60), position_ids=on_a_grid(60))
        found.append(last_logits("qwen2_vl", held, ids(1, seed=5), position_ids=torch.full((3, 1, 1), 48)))
    assert_near(found[0], found[1], 0.05)


def padding(positions: Tensor, n_before: int) -> list[int]:
    found = left_padding(positions, n_before, turns=True)
    assert found is not None
    return found.tolist()


@pytest.mark.parametrize("n_axes", [3, 4])
def test_text_positions_on_several_axes_are_those_of_one(n_axes: int) -> None:
    """Padded on the left, as `generate` gives them: the axes that turn agree."""
    at = torch.stack([torch.arange(6), torch.tensor([0, 0, 0, 1, 2, 3])])
    assert padding(at.expand(3, 2, 6), 0) == [0, 2]
    several = torch.cat([torch.zeros(n_axes - 3, 2, 6).long(), at.expand(3, 2, 6)])
    assert padding(several, 0) == [0, 2]
    assert padding(several[..., -1:], 5) == [0, 2]


@pytest.mark.parametrize(
    "positions",
    [
        [0, 1, 2, 0, 1, 2],
        [0, 2, 4, 6, 8, 10],
        [0, 1, 2, 3, 3, 3],
        [5, 4, 3, 2, 1, 0],
        [7, 8, 9, 10, 11, 9],
        [0, 0, 0, 0, 0, 5],
        [1, 1, 1, 1, 5, 6],
        [0, 0, 0, 0, 0, 2],
    ],
)
def test_positions_that_do_not_rise_by_one_are_refused_by_a_codec_that_turns_keys(positions: list[int]) -> None:
    given = torch.tensor([positions])
    with pytest.raises(ValueError, match="position_ids do not rise by one"):
        left_padding(given, 0, turns=True)
    assert left_padding(given, 0, turns=False) is not None
    cache = CompressedCache(model_of("llama"), codec("llama", "spectra:group=4"))
    with pytest.raises(ValueError, match="position_ids do not rise by one"):
        last_logits("llama", cache, ids(6), position_ids=given)


def test_padded_and_shifted_positions_are_served() -> None:
    assert padding(torch.tensor([[0, 0, 0, 1, 2], [1, 1, 0, 1, 2]]), 0) == [2, 2]
    assert padding(torch.tensor([[0, 0, 0], [1, 1, 1]]), 0) == [2, 1]  # a part of the prompt that is padding alone
    assert padding(torch.tensor([7, 8, 9]), 5) == [-2]
    assert left_padding(None, 0, turns=True) is None


# what a cache says of itself


def test_a_cache_is_not_pickled_and_says_what_would_do() -> None:
    with pytest.raises(TypeError, match=r"use cache\.save\(folder\), and CompressedCache\.load\(model, folder\)"):
        pickle.dumps(CompressedCache(model_of("llama"), codec("llama", "int8")))


def test_a_recipe_that_drops_tokens_says_so() -> None:
    assert set(codec("llama", "snapkv").left_exact.values()) == {
        "the recipe drops tokens and codes none: those that are left are exact"
    }


@pytest.mark.parametrize("n_first", [32, 64])
def test_a_score_that_chose_too_early_says_that_all_stays(n_first: int) -> None:
    """Of a prompt in chunks the first decides: whether it was longer than what is kept is to be seen."""
    cache = CompressedCache(model_of("llama"), codec("llama", "snapkv:kept=40"))
    for part in ids(128).split(n_first, dim=1):
        last_logits("llama", cache, part)
    reason = cache.report().layers[0].reason
    assert ("which fitted its budget: later tokens all stay" in reason) == (n_first == 32)


def test_a_model_in_float16_is_told_what_would_do() -> None:
    made = codec("llama", "int8")
    with pytest.raises(ValueError, match="in float16 the same model has others: load it in bfloat16 or float32"):
        CompressedCache(build("llama").half(), made)
