"""Whether a window suits a model, asked before any work: whose tokens may be dropped, and whose queries can be seen.

dropped tokens shift the others, which is seen by attention that adds a bias for the distance (ALiBi)
a score by attention needs queries that read the cached keys as they are (latent attention expands them)
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from karhunen.hf.capture import Attention, can_be_routed
from karhunen.hf.probe import RecordingCache, Update, forward, inference, probe_tokens, text_config
from karhunen.hf.queries import showing
from karhunen.windows.base import Window

CHANGED = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Relative difference that is more than rounding."""

_DISTANCES: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()
_UNSEEN: "WeakKeyDictionary[nn.Module, dict[int, str]]" = WeakKeyDictionary()


def check_window(model: nn.Module, window: Window) -> None:
    """ValueError, with what would do, if the window cannot serve this model."""
    if window.drops and reads_distances(model):
        raise ValueError(
            f"{type(window).__name__} drops tokens, and the attention of {type(model).__name__} adds a bias for the "
            "distance between tokens (ALiBi), which it would take among those that are left; use a recipe that drops "
            "none, such as nova_kv, kivi or int4"
        )
    if window.reads != "never" and (unseen := unseen_layers(model)):
        layer, reason = min(unseen.items())
        raise ValueError(
            f"{type(window).__name__} chooses tokens by the queries that read them, and in layer {layer} {reason}; "
            "use a recipe that needs no queries, such as key_norm or int4"
        )


def unseen_layers(model: nn.Module) -> dict[int, str]:
    """Layers whose attention is not seen to read what they cache, and why. Runs one forward of ten tokens."""
    if model not in _UNSEEN:
        _UNSEEN[model] = _unseen_layers(model)
    return _UNSEEN[model]


def _unseen_layers(model: nn.Module) -> dict[int, str]:
    tokens, cached, seen = probe_tokens(model), dict[int, Update](), set[int]()

    def listen(layer: int, key: Tensor, value: Tensor) -> None:
        cached[layer] = key, value

    def attend(attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        layer = int(getattr(attention.module, "layer_idx", -1))
        if layer in cached and all(_same(x, y) for x, y in zip((key, value), cached[layer], strict=True)):
            seen.add(layer)
        return plain()

    routed = can_be_routed(model)
    with inference(model), showing(model, attend) if routed else nullcontext():
        forward(model, RecordingCache(model, listen), tokens)
    reason = (
        "its attention does not read the cached keys and values as they are (latent attention)"
        if routed
        else "its attention does not go through transformers' interface"
    )
    return {layer: reason for layer in cached if layer not in seen}


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def reads_distances(model: nn.Module) -> bool:
    """Whether attention depends on the distance between tokens whose cached vectors do not depend on their positions.

    Two tokens change places: what the last one makes of them in the next layer stays, unless distances count.
    """
    if model not in _DISTANCES:
        _DISTANCES[model] = _reads_distances(model)
    return _DISTANCES[model]


def _reads_distances(model: nn.Module) -> bool:
    types: Iterable[str] = getattr(text_config(model), "layer_types", None) or ()
    if any("attention" not in kind for kind in types):
        return False  # a recurrent layer depends on the order by itself
    tokens = probe_tokens(model)
    alike, _ = _forward(model, tokens[:, :1].expand(1, 8))
    if not alike:
        return False  # nothing is cached
    first = min(alike)
    if any(_differ(x, x[:, :, :1].expand_as(x)) for x in alike[first] if x.ndim == 4):
        return False  # rotated or learned positions: the vectors themselves carry them
    swapped = tokens.clone()
    swapped[:, [1, -2]] = tokens[:, [-2, 1]]
    (one, out), (other, out_other) = _forward(model, tokens), _forward(model, swapped)
    later = [layer for layer in sorted(one) if layer != first]
    if not later:
        return _differ(out[:, -1], out_other[:, -1])
    pairs = zip(one[later[0]], other[later[0]], strict=True)
    return any(_differ(x[..., -1, :], y[..., -1, :]) for x, y in pairs)


def _forward(model: nn.Module, tokens: Tensor) -> tuple[dict[int, Update], Tensor]:
    """What each layer caches, and the output."""
    seen: dict[int, Update] = {}

    def listen(layer: int, key: Tensor, value: Tensor) -> None:
        seen[layer] = key, value

    with inference(model):
        out: Any = forward(model, RecordingCache(model, listen), tokens)
    return seen, out[0]


def _differ(x: Tensor, y: Tensor) -> bool:
    size = x.float().norm().clamp_min(1e-30)
    return bool((x.float() - y.float()).norm() > CHANGED.get(x.dtype, 1e-3) * size)
