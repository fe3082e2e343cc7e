"""A backward pass in the memory of one layer: the plain pass's bits, less memory, no marks."""

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from tests.allocations import peak_bytes
from tests.hf.tiny import FAMILIES, build

from karhunen.hf import gradients
from karhunen.hf.checkpointing import checkpointed, decoder_layers
from karhunen.hf.gradients import ReadGradient, read_gradients

N_TOKENS, NEAR = 48, 12
GIVING_GRADIENTS = (
    "llama", "qwen2", "qwen3", "gemma3", "gemma2", "gemma4", "gpt_oss", "gpt2", "gpt_neox", "phi", "phi3", "cohere",
    "glm", "opt", "smollm3", "mistral", "lfm2", "falcon_h1", "qwen3_next", "stablelm",
)  # fmt: skip


class Interrupt(Exception):
    pass


def ids(n_tokens: int = N_TOKENS) -> torch.Tensor:
    return torch.randint(3, 98, (n_tokens,), generator=torch.Generator().manual_seed(5))


def read(model: Any) -> dict[int, ReadGradient]:
    found: dict[int, ReadGradient] = {}
    read_gradients(model, ids(), 0, found.__setitem__, NEAR)
    return found


@pytest.mark.parametrize("family", GIVING_GRADIENTS)
def test_gradients_are_those_of_the_plain_pass_bit_for_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    ours = read(model)
    monkeypatch.setattr(gradients, "checkpointed", lambda _: nullcontext())
    plain = read(model)
    assert ours.keys() == plain.keys()
    assert ours, "some layer gives gradients"
    for layer, found in ours.items():
        for name, tensor in vars(found).items():
            assert torch.equal(tensor, getattr(plain[layer], name)), (layer, name)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_layer_more_costs_its_input_alone(family: str) -> None:
    width = 48
    depth = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 3}
    n_layers = next(iter(depth.values()))

    def peak(factor: int) -> int:
        more: dict[str, Any] = {name: factor * n for name, n in depth.items()}
        if family == "gemma3":
            more["layer_types"] = ["full_attention"] * factor * n_layers
        model = build(family, **more)
        return peak_bytes(lambda: read_gradients(model, ids(256), 0, lambda *_: None, NEAR))

    added = (peak(4) - peak(2)) / (2 * n_layers)
    assert added == pytest.approx(256 * width * 4, rel=0.1), f"{added:,} bytes a layer"


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"mamba"}))
def test_every_decoder_layer_is_found_once(family: str) -> None:
    model = build(family)
    attentions = [m for m in model.modules() if getattr(m, "layer_idx", None) is not None]
    layers = decoder_layers(model)
    assert len(layers) == len(set(layers))
    for attention in attentions:
        holding = [layer for layer in layers if any(m is attention for m in layer.modules())]
        assert len(holding) == 1, type(attention).__name__


def test_forwards_are_put_back_also_those_that_were_replaced() -> None:
    model = build("llama")
    first, second = decoder_layers(model)
    own: Any = first.forward
    first.forward = lambda *arguments, **named: own(*arguments, **named)
    replaced = first.forward
    with suppress(Interrupt), checkpointed(model):
        assert first.forward is not replaced
        raise Interrupt
    assert first.forward is replaced
    assert "forward" not in vars(second)
    del first.forward
    read(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_weights_that_hooks_bring_in_turn_give_the_same_gradients() -> None:
    from accelerate import cpu_offload

    plain = read(build("llama"))
    model = build("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    moved = read(model)
    assert all(p.is_meta for layer in decoder_layers(model) for p in layer.parameters()), "taken away again"
    for layer, found in plain.items():
        assert torch.equal(found.by_key, moved[layer].by_key)
        assert torch.equal(found.by_value, moved[layer].by_value)
