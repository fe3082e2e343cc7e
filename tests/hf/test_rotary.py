import pytest
import torch
from tests.closeness import LAYERS, assert_near
from tests.hf.tiny import build

from karhunen.hf.probe import probe_tokens, updates
from karhunen.hf.rotary import detect_rotary

# family: (rotated coordinates, interleaved) of each layer's key slot
ROTATIONS: dict[str, list[tuple[int, bool] | None]] = {
    "llama": [(12, False)] * 2,
    "llama_yarn": [(12, False)] * 2,
    "llama_llama3": [(12, False)] * 2,
    "llama_dynamic": [(12, False)] * 2,
    "llama_linear": [(12, False)] * 2,
    "qwen2": [(12, False)] * 2,
    "qwen3": [(16, False)] * 2,
    "gemma3": [(32, False)] * 3,
    "phi": [(8, False)] * 2,
    "gpt_neox": [(4, False)] * 2,
    "stablelm": [(4, False)] * 2,
    "gptj": [(8, True)] * 2,
    "cohere": [(12, True)] * 2,
    "glm": [(8, True)] * 2,
    "gpt_oss": [(16, False)] * 2,
    "nanochat": [(12, False)] * 2,
    "smollm3": [(12, False)] * 3 + [None],
    "llama4": [(16, True)] * 3 + [None],
    "bloom": [None, None],
    "mla": [None, None],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ROTATIONS)
def test_the_rotation_is_found_in_the_model(family: str, dtype: torch.dtype) -> None:
    found = detect_rotary(build(family).to(dtype))
    keys = [layer.key for layer in found.values()]
    assert [key and (key.n_rotated, key.interleaved) for key in keys] == ROTATIONS[family]
    assert all(layer.note == "" for layer in found.values())


@pytest.mark.parametrize("family", [name for name, found in ROTATIONS.items() if found[0]])
def test_it_moves_keys_between_positions_as_the_model_does(family: str) -> None:
    model = build(family)
    found, tokens = detect_rotary(model), probe_tokens(model, 8)
    for shift in (3, 250):
        here = updates(model, tokens, position_ids=torch.arange(8)[None])
        there = updates(model, tokens, position_ids=torch.arange(shift, shift + 8)[None])
        for layer, rotary in found.items():
            moved = here[layer][0]
            if rotary.key is not None:
                moved = rotary.key.rotate(moved.double(), torch.full((1, 1, 8), shift))
            assert_near(moved, there[layer][0], LAYERS)


def test_local_and_global_layers_turn_at_their_own_base() -> None:
    keys = [layer.key for layer in detect_rotary(build("gemma3")).values()]
    bases = [float(key.inv_freq[1]) ** -16 for key in keys if key is not None]  # inv_freq_i = base^(−i/16)
    assert bases == pytest.approx([1e4, 1e4, 1e6], rel=1e-3)


def test_latent_attention_turns_the_second_slot_only() -> None:
    layer = detect_rotary(build("mla"))[0]
    assert layer.key is None
    assert layer.value is not None
    assert layer.value.n_rotated == 8


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_no_rotation_and_say_so(family: str) -> None:
    for layer in detect_rotary(build(family)).values():
        assert layer.key is None
        assert "do not move by a rotation" in layer.note


def test_layers_without_a_cache_have_no_rotation_to_find() -> None:
    assert list(detect_rotary(build("lfm2"))) == [1]
    assert list(detect_rotary(build("gemma3n"))) == [0, 1]


def test_detection_leaves_dynamic_frequencies_as_they_were() -> None:
    model = build("llama_dynamic")
    before = model.model.rotary_emb.inv_freq.clone()
    detect_rotary(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
