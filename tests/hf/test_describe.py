from typing import Any

import pytest
import torch
from tests.hf.tiny import build

from karhunen.hf.describe import config_hash, describe, identity_of
from karhunen.statistics.identity import LayerShape


def kinds(family: str) -> list[str]:
    return [layer.kind for layer in describe(build(family)).layers]


def test_shapes_are_those_of_the_cached_tensors_not_of_the_configuration() -> None:
    assert describe(build("llama")).layers == (LayerShape("full", 2, 4, 12, 12),) * 2
    assert describe(build("qwen3")).layers[0] == LayerShape("full", 2, 4, 16, 16)


def test_latent_attention_caches_a_latent_and_a_rotary_part() -> None:
    layer = describe(build("mla")).layers[0]
    assert (layer.n_kv_heads, layer.n_query_heads, layer.key_dim, layer.value_dim) == (1, 4, 32, 8)


def test_sliding_layers_carry_their_window() -> None:
    layers = describe(build("gemma3")).layers
    assert [layer.kind for layer in layers] == ["sliding", "sliding", "full"]
    assert [layer.window_tokens for layer in layers] == [16, 16, None]
    assert kinds("mistral") == ["sliding", "sliding"]


def test_layers_of_one_model_may_differ_in_shape() -> None:
    layers = describe(build("gemma4")).layers
    assert [layer.key_dim for layer in layers] == [16, 32, 0, 0]


@pytest.mark.parametrize(
    ("family", "expected", "word"),
    [
        ("lfm2", ["other", "full"], "conv"),
        ("qwen3_next", ["other", "full"], "linear_attention"),
        ("gemma3n", ["sliding", "full", "other", "other"], "shared"),
        ("gemma4", ["sliding", "full", "other", "other"], "shared"),
        ("falcon_h1", ["other", "other"], "hybrid"),
    ],
)
def test_layers_without_a_plain_cache_are_other_and_say_why(family: str, expected: list[str], word: str) -> None:
    layers = describe(build(family)).layers
    assert [layer.kind for layer in layers] == expected
    assert all(word in layer.note for layer in layers if layer.kind == "other")


def test_a_model_without_attention_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention cache to compress"):
        describe(build("mamba"))


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match="encoder-decoder"):
        describe(T5ForConditionalGeneration(config))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_identity_survives_a_reload_in_another_dtype_and_attention(family: str, tmp_path: Any) -> None:
    model = build(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    before = describe(model)
    for settings in ({"dtype": torch.float32}, {"dtype": torch.bfloat16, "attn_implementation": "eager"}):
        again = type(model).from_pretrained(tmp_path, **settings)
        assert describe(again) == before
    inner = type(model.base_model).from_pretrained(tmp_path, dtype=torch.float32)
    assert before.mismatch(describe(inner)) is None


def test_identity_tells_models_apart() -> None:
    one, other = build("llama"), build("llama")
    assert describe(one) == describe(other)
    other.model.layers[0].self_attn.k_proj.weight.data.add_(1.0)
    assert "weights" in str(describe(one).mismatch(describe(other)))
    scaled = build("llama_yarn")
    assert "configuration" in str(describe(one).mismatch(describe(scaled)))
    assert config_hash(one.config) != config_hash(build("llama", rms_norm_eps=1e-3).config)


@pytest.mark.parametrize("how", ["load_state_dict", "training", "another parameter", "data"])
def test_a_model_that_was_written_to_is_another_one(how: str) -> None:
    model = build("llama")
    before = identity_of(model)
    assert identity_of(model) is before, "remembered"
    if how == "load_state_dict":
        model.load_state_dict({name: x + 0.1 for name, x in model.state_dict().items()})
    elif how == "training":
        model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    elif how == "data":  # as adapters are merged
        model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.01)
    else:
        layer = model.model.layers[0].self_attn.k_proj
        layer.weight = torch.nn.Parameter(layer.weight.detach() + 1)
    assert "it was made for weights" in str(before.mismatch(identity_of(model)))


def test_describing_leaves_no_mark() -> None:
    model = build("llama").train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    describe(model)
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
