from threading import Thread, get_ident

import pytest
import torch
from tests.closeness import SUM, assert_near
from tests.hf.tiny import build
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from karhunen.hf.capture import Observation, capturing
from karhunen.hf.gradients import ReadGradient, read_gradients
from karhunen.hf.queries import register

IDS = torch.randint(1, 99, (2, 24), generator=torch.Generator().manual_seed(1))


def observe(family: str, mask: torch.Tensor | None = None) -> list[Observation]:
    seen: list[Observation] = []
    with capturing(build(family), seen.append) as run:
        run(IDS, mask)
    return seen


def own_attention(seen: Observation) -> torch.Tensor:
    """Softmax of an observation, spelled out: [b q t t]."""
    attention = seen.attention
    assert attention is not None
    t = seen.key.shape[2]
    keys = seen.key.repeat_interleave(attention.query.shape[1] // seen.key.shape[1], 1)
    scores = attention.query @ keys.mT * attention.scale
    order = torch.arange(t)
    visible = order <= order[:, None]
    if attention.window_tokens is not None:
        visible &= order > order[:, None] - attention.window_tokens
    scores = scores.masked_fill(~(visible & seen.valid[:, None, None]), -torch.inf)
    if attention.sinks is not None:
        sinks = attention.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "phi", "cohere", "gpt2", "lfm2"])
def test_what_is_seen_explains_the_output_of_the_attention(family: str) -> None:
    """Queries, keys, scale, window and sinks together reproduce the attention the model computes."""
    model, outputs = build(family), []
    seen: list[Observation] = []
    model.set_attn_implementation("eager")
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            module.register_forward_hook(lambda _m, _a, out: outputs.append(out[1]))
    with capturing(model, seen.append) as run:
        run(IDS, None)
    assert len(seen) == len(outputs) > 0
    for observation, weights in zip(seen, outputs, strict=True):
        assert_near(own_attention(observation), weights, SUM)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "mla", "bloom", "gemma3n", "qwen3_next"])
def test_capturing_changes_nothing_and_leaves_no_mark(family: str) -> None:
    """On the model; the names of `hf.queries` stay known to transformers from their first use on."""
    register()
    model = build(family)
    before = model.config._attn_implementation
    registries = AttentionInterface().valid_keys(), AttentionMaskInterface().valid_keys()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        with capturing(model, lambda _: None):
            during = model(input_ids=IDS).logits
    assert torch.equal(during, expected)
    assert model.config._attn_implementation == before
    assert (AttentionInterface().valid_keys(), AttentionMaskInterface().valid_keys()) == registries


def test_an_error_in_the_listener_leaves_no_mark() -> None:
    register()
    model = build("llama").train()
    registry = AttentionInterface().valid_keys()

    def fail(_: Observation) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), capturing(model, fail) as run:
        run(IDS, None)
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert AttentionInterface().valid_keys() == registry


def test_two_captures_may_be_nested() -> None:
    outer, inner = [], []
    model = build("llama")
    with capturing(model, outer.append), capturing(model, inner.append) as run:
        run(IDS, None)
    assert [seen.layer for seen in inner] == [0, 1]
    assert model.config._attn_implementation == "sdpa"


def test_another_thread_runs_the_model_undisturbed_while_it_is_observed() -> None:
    """Its forward falls into the middle of ours, forward and backward, and gives what it gives alone."""
    model, ids = build("llama"), IDS[:1].repeat(1, 8)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    mine, found, seen = get_ident(), list[torch.Tensor](), list[int]()

    def plain() -> None:
        with torch.no_grad():
            found.append(model(input_ids=IDS).logits)

    def beside(*_: object) -> None:
        if get_ident() == mine:
            thread = Thread(target=plain)
            thread.start()
            thread.join()

    handle = model.model.layers[1].register_forward_hook(beside)
    read_gradients(model, ids[0], 0, lambda layer, _: seen.append(layer), near_tokens=16)
    n_by_gradients = len(found)
    with capturing(model, lambda one: seen.append(one.layer if one.attention else -1)) as run:
        run(ids)
    handle.remove()
    assert seen == [1, 0, 0, 1]
    assert 0 < n_by_gradients < len(found)
    assert all(torch.equal(logits, expected) for logits in found)


def test_layers_that_run_again_in_a_thread_of_pytorch_are_observed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose backward pass has a thread of its own."""
    model, ids, seen = build("llama"), IDS[0].repeat(8), list[dict[int, ReadGradient]]()

    def gradients() -> None:
        found: dict[int, ReadGradient] = {}
        read_gradients(model, ids, 0, found.__setitem__, near_tokens=16)
        seen.append(found)

    gradients()
    own = torch.Tensor.backward

    def elsewhere(self: torch.Tensor, *given: torch.Tensor) -> None:
        thread = Thread(target=own, args=(self, *given))
        thread.start()
        thread.join()

    monkeypatch.setattr(torch.Tensor, "backward", elsewhere)
    gradients()
    here, there = seen
    assert here.keys() == there.keys() == {0, 1}
    assert all(torch.equal(here[i].by_key, there[i].by_key) and here[i].by_key.any() for i in here)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_the_tokens_that_are_no_padding(side: str) -> None:
    mask = torch.ones_like(IDS)
    mask[1, :20] = 0
    mask = mask if side == "left" else mask.flip(-1)
    seen = observe("llama", mask)[0]
    assert torch.equal(seen.valid, mask.bool())
    assert seen.positions[1][seen.valid[1]].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mla", "latent attention"), ("bloom", "does not go through transformers' attention interface")],
)
def test_where_queries_are_out_of_reach_the_cache_is_seen_all_the_same(family: str, reason: str) -> None:
    seen = observe(family)
    assert [observation.layer for observation in seen] == [0, 1]
    assert all(observation.attention is None and reason in observation.unseen for observation in seen)


def test_layers_that_read_another_layers_cache_are_not_observed() -> None:
    assert [seen.layer for seen in observe("gemma3n")] == [0, 1]
