"""Gradients through far reads: against PyTorch's own, where near and far are put together by hand."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.closeness import LAYERS, assert_near
from tests.fake_device import fake_device
from tests.hf.families import model_of
from tests.hf.tiny import build
from torch import Tensor
from transformers import DynamicCache

from karhunen.calibration.gradients import measure_gradients
from karhunen.hf import gradients
from karhunen.hf.capture import Attention
from karhunen.hf.gradients import SINK_TOKENS, ReadGradient, read_gradients
from karhunen.hf.probe import cache_argument, inference, updates
from karhunen.hf.queries import showing
from karhunen.hf.rotary import detect_rotary
from karhunen.statistics.need import Need

N_TOKENS, NEAR = 48, 12
SHARING = ("gemma3n", "gemma4")  # layers 2 and 3 read what layers 0 and 1 have made
FAMILIES = ("llama", "gemma3", "gpt_oss", "qwen3", *SHARING)
LATENT = ("DeepSeek V2", "DeepSeek V3", "MiniCPM3")  # attention reads what is made of the cache


def tokens(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, model.config.get_text_config().vocab_size - 1, (N_TOKENS,), generator=generator)


def far(model: Any, ids: Tensor, near_tokens: int = NEAR, seed: int = 0) -> dict[int, ReadGradient]:
    found: dict[int, ReadGradient] = {}
    read_gradients(model, ids, seed, found.__setitem__, near_tokens)
    return dict(sorted(found.items()))


def by_autograd(model: Any, ids: Tensor, alone: bool = False) -> dict[int, tuple[Tensor, Tensor]]:
    """Far keys and values are leaves of their own in attention written out in full; a layer that reads what another
    has made reads the leaves of that one, or, with `alone`, leaves that nobody asks for."""
    leaves: dict[int, tuple[Tensor, Tensor]] = {}
    made: list[tuple[Tensor, int]] = []

    def attend(attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        layer = int(attention.module.layer_idx)  # type: ignore[arg-type]
        owner = next((i for k, i in made if torch.equal(k, key)), layer)
        if owner == layer:
            made.append((key, layer))
            leaves[layer] = tuple(torch.zeros_like(x, requires_grad=True) for x in (key, value))  # type: ignore[assignment]
        far_k, far_v = leaves[owner]
        if alone and owner != layer:
            far_k, far_v = torch.zeros_like(key), torch.zeros_like(value)
        repeat = attention.query.shape[1] // key.shape[1]
        k, v, k_far, v_far = (x.repeat_interleave(repeat, 1) for x in (key, value, key + far_k, value + far_v))
        age = torch.arange(N_TOKENS)[:, None] - torch.arange(N_TOKENS)
        is_far = (age >= NEAR) & (torch.arange(N_TOKENS) >= SINK_TOKENS)
        hidden = age < 0
        if attention.window_tokens is not None:
            hidden = hidden | (age >= attention.window_tokens)
        score = torch.where(is_far, attention.query @ k_far.mT, attention.query @ k.mT) * attention.scale
        score = score.masked_fill(hidden, -torch.inf)
        if attention.sinks is not None:
            sink = attention.sinks[None, :, None, None].expand(1, -1, N_TOKENS, 1)
            p = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        else:
            p = score.softmax(-1)
        return ((p * is_far) @ v_far + (p * ~is_far) @ v).transpose(1, 2), None

    head = model.get_output_embeddings()
    with inference(model), torch.enable_grad(), showing(model, attend):
        hidden = gradients._hidden_states(model, head, ids)  # pyright: ignore[reportPrivateUsage]
        gradients._backward(model, head, hidden, seed=0)  # pyright: ignore[reportPrivateUsage]
    return {i: (cast("Tensor", k.grad), cast("Tensor", v.grad)) for i, (k, v) in leaves.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_far_gradients_are_those_of_attention_written_out(family: str) -> None:
    model = build(family).float().eval()
    ids = tokens(model)
    ours, theirs = far(model, ids), by_autograd(model, ids)
    assert ours.keys() == theirs.keys()
    for layer, found in ours.items():
        assert_near(found.by_key, theirs[layer][0], LAYERS)
        assert_near(found.by_value, theirs[layer][1], LAYERS)
    assert any(bool(found.by_key.any()) for found in ours.values()), "some layer reads far tokens"


@pytest.mark.parametrize("family", SHARING)
def test_readers_of_a_shared_layer_reach_the_layer_that_caches(family: str) -> None:
    """Which has the keys that are cached, and gradients that are not those through its own reads."""
    model = build(family).float().eval()
    ids = tokens(model)
    cached = updates(model, ids[None])
    found, own = far(model, ids), by_autograd(model, ids, alone=True)
    assert found.keys() == cached.keys() == {0, 1}
    for layer, seen in found.items():
        assert torch.equal(seen.key, cached[layer][0]) and torch.equal(seen.value, cached[layer][1])
    share = (found[1].by_value - own[1][1]).norm() / found[1].by_value.norm()
    assert share > 0.1, "the other reader's part is no rounding error"


class Leaves(DynamicCache):
    """Notes what a model caches, and gives each a leaf that stands for a change of it."""

    def __init__(self, model: Any) -> None:
        super().__init__(config=model.config)
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.cached[layer_idx] = key_states, value_states
        leaves = [torch.zeros_like(x).requires_grad_() for x in (key_states, value_states)]
        self.leaves[layer_idx] = leaves[0], leaves[1]
        return key_states, value_states


def latent_by_autograd(model: Any, ids: Tensor) -> Leaves:
    """Attention written out in full, whose far reads are of keys and values expanded from changed latents."""
    cache = Leaves(model)

    def attend(attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        module: Any = attention.module
        changed = [
            x + leaf for x, leaf in zip(cache.cached[module.layer_idx], cache.leaves[module.layer_idx], strict=True)
        ]
        k_far, v_far = module.expand_kv(*changed)
        age = torch.arange(N_TOKENS)[:, None] - torch.arange(N_TOKENS)
        is_far = (age >= NEAR) & (torch.arange(N_TOKENS) >= SINK_TOKENS)
        score = torch.where(is_far, attention.query @ k_far.mT, attention.query @ key.mT) * attention.scale
        p = score.masked_fill(age < 0, -torch.inf).softmax(-1)
        return ((p * is_far) @ v_far + (p * ~is_far) @ value).transpose(1, 2), None

    head = model.get_output_embeddings()
    with inference(model), torch.enable_grad(), showing(model, attend):
        seen: list[Tensor] = []
        hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(input_ids=ids[None], use_cache=True, **{cache_argument(model): cache})
        hook.remove()
        gradients._backward(model, head, seen[0], seed=0)  # pyright: ignore[reportPrivateUsage]
    return cache


@pytest.mark.parametrize("family", LATENT)
def test_gradients_of_latents_go_back_through_the_expansion(family: str) -> None:
    model = model_of(family)  # whose weights are frozen: nothing before the first cache takes gradients
    ids = tokens(model)
    found, theirs = far(model, ids), latent_by_autograd(model, ids)
    assert found.keys() == theirs.leaves.keys() == {0, 1}
    for layer, seen in found.items():
        for mine, leaf in zip((seen.by_key, seen.by_value), theirs.leaves[layer], strict=True):
            assert leaf.grad is not None
            assert_near(mine, leaf.grad, LAYERS)
        assert bool(seen.by_key.any()), "latents are read from afar"
        assert bool(seen.by_value.any()), "rotary parts are read from afar"
        for mine, cached in zip((seen.key, seen.value), theirs.cached[layer], strict=True):
            assert_near(mine, cached, LAYERS)


def test_shared_layers_on_several_devices_are_refused_before_any_work() -> None:
    model = build("gemma3n").float().eval()
    with torch.no_grad(), fake_device() as device:
        device.model(model.model.layers[3])
        with pytest.raises(ValueError, match="lie on 2 devices"):
            far(model, tokens(model))


def test_reads_within_the_window_and_of_sinks_give_no_gradient() -> None:
    model = build("llama").float().eval()
    found = far(model, tokens(model))[0]
    assert not found.by_key[:, :, -NEAR:].any(), "the newest tokens have no far reader"
    assert not found.by_value[:, :, :SINK_TOKENS].any()
    assert not far(model, tokens(model), N_TOKENS)[0].by_key.any()


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama").float()
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    implementation = model.config._attn_implementation
    far(model, tokens(model))
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    assert model.config._attn_implementation == implementation
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_the_same_seed_draws_the_same_outcomes() -> None:
    model = build("llama").float().eval()
    first, again, other = (far(model, tokens(model), seed=seed)[0].by_value for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_fisher_moments_are_gradients_turned_into_the_frame() -> None:
    model = build("llama").float().eval()
    ids, rotaries = tokens(model), detect_rotary(model)
    need = Need("gradients", "key", block_tokens=1, skip_tokens=SINK_TOKENS, near_tokens=NEAR)
    plain = Need("gradients", "key", skip_tokens=SINK_TOKENS, near_tokens=NEAR)
    found = measure_gradients(model, ids, {0: [need, plain], 1: [need]}, rotaries, seed=0)
    turned, still = found[0][need], found[0][plain]
    assert float(turned.count[0]) == N_TOKENS - SINK_TOKENS
    assert bool(turned.outer.any())
    trace = [m.outer.diagonal(dim1=-2, dim2=-1).sum() for m in (turned, still)]
    torch.testing.assert_close(trace[0], trace[1])
    assert not torch.allclose(turned.outer, still.outer)
