"""A backward pass through a deep model in the memory of one layer: inside a layer nothing is kept, it runs once more.

    kept:  what each decoder layer was given        ─▶ one vector per token and layer
    anew:  what is inside, layer by layer, when its turn in the backward pass comes

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174), one segment per layer.
Here:   weights do not move, so only a layer's input and what its gradient passes through matter. The layer runs on the
same bits twice, so gradients are those of the plain pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Each decoder layer of the model keeps its inputs alone for the backward pass, for the duration.

    Forwards that were replaced on the module (accelerate's hooks) are the ones that run. Models without layers in a
    list keep all, as without this. Afterwards every module is as it was.
    """
    layers = decoder_layers(model)
    replaced = [(layer, vars(layer).get("forward")) for layer in layers]
    moved = any(hasattr(module, "_hf_hook") for module in model.modules())
    for layer in layers:
        layer.forward = _twice(layer.forward)
    try:
        # a hook that takes weights away after the layer must see it end, also the second time
        with set_checkpoint_early_stop(not moved):
            yield
    finally:
        for layer, own in replaced:
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost modules in lists that hold an attention with a layer's index, in order."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or module in inside:
            continue
        layers = [part for part in module if any(getattr(m, "layer_idx", None) is not None for m in part.modules())]
        found += layers
        inside.update(m for layer in layers for m in layer.modules())
    return found


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The second time may be in a thread of PyTorch's, which knows nothing of what this one was set to."""

    def run(*args: Any, **kwargs: Any) -> Any:
        as_here = partial(copy_context().run, forward)
        return checkpoint(as_here, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
