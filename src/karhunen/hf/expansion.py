"""Gradients by what is cached, where attention reads something made from it: latent attention expands its cache first.

    (c, r) ── cache ── expansion E ──▶ k, v ──▶ attention          g_cr = (g_k, g_v) · ∂E / ∂(c, r)

The expansion is the model's own code, whatever it is; what is noted of it is where its graph begins and ends.
"""

from collections.abc import Callable
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from transformers import DynamicCache

from karhunen.hf.capture import Attention, can_be_routed
from karhunen.hf.probe import forward, inference, probe_tokens, text_config
from karhunen.hf.queries import showing
from karhunen.hf.rotary import is_recurrent
from karhunen.hf.suits import unseen_layers

_EXPANDED: "WeakKeyDictionary[nn.Module, frozenset[int]]" = WeakKeyDictionary()


@final
class PassingCache(DynamicCache):
    """Hands on what it is given, with gradients, and keeps none of it, so that a layer may run twice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(config=text_config(model))
        self.handed_on: dict[int, tuple[Tensor, Tensor]] = {}

    def update(  # the keyword names are those of the library
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        self.handed_on[layer_idx] = _differentiable(key_states), _differentiable(value_states)
        return self.handed_on[layer_idx]

    def read_by(self, layer: int, key: Tensor, value: Tensor) -> "tuple[tuple[Tensor, Tensor], Expansion | None]":
        """What was cached where attention reads `key` and `value`, and what lies between; None if nothing does. Asked
        for once for each update."""
        cached = self.handed_on.pop(layer, (key, value))
        if cached[0] is key and cached[1] is value:
            return cached, None
        return cached, Expansion(cached, (key, value))


def _differentiable(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_(True)


@final
class Expansion:
    """The way from what was cached to what attention reads. Of the vectors themselves it keeps none."""

    def __init__(self, cached: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor]) -> None:
        self._begins = tuple(map(get_gradient_edge, cached))
        self._ends = tuple(get_gradient_edge(x) for x in read if x.requires_grad)
        self._depends = tuple(x.requires_grad for x in read)

    def back(self, *by_read: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients by what was cached from those by the keys and values that are read; None where these do not depend
        on it."""
        given = [g for g, depends in zip(by_read, self._depends, strict=True) if depends]
        if not given:
            return None, None
        found = torch.autograd.grad(self._ends, self._begins, given, retain_graph=True, allow_unused=True)
        return found[0], found[1]


def expanded_layers(model: nn.Module) -> frozenset[int]:
    """Layers whose attention reads what is made of all that they cache, by steps that can be differentiated. Runs one
    or two forwards of ten tokens."""
    unseen = unseen_layers(model)
    if not unseen or torch.is_inference_mode_enabled() or any(p.is_inference() for p in model.parameters()):
        return frozenset()  # nothing is made of the cache, or nothing can be differentiated now
    if model not in _EXPANDED:
        _EXPANDED[model] = _expanded_layers(model).intersection(unseen)
    return _EXPANDED[model]


def _expanded_layers(model: nn.Module) -> frozenset[int]:
    if not can_be_routed(model) or is_recurrent(model):  # a recurrent state would be taken on twice
        return frozenset()
    cache, found = PassingCache(model), set[int]()

    def attend(attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        layer = int(getattr(attention.module, "layer_idx", -1))
        _, expansion = cache.read_by(layer, key, value)
        if expansion is not None:
            gradients = expansion.back(torch.ones_like(key), torch.ones_like(value))
            found.update([layer] if all(g is not None for g in gradients) else [])
        return plain()

    with inference(model), torch.enable_grad(), showing(model, attend):
        forward(model, cache, probe_tokens(model))
    return frozenset(found)
