"""A model's output projections W_O, exchanged: for the length of a context, or for good."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from karhunen.hf.describe import identity_held

OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo", "proj", "output_proj")

Weights = Mapping[int, Float[Tensor, "hidden n"]]


def output_layer(module: nn.Module, n_inputs: int) -> tuple[nn.Module, bool] | None:
    """The output projection of an attention module and whether it stores its transpose (GPT-2's Conv1D).

    None if it has none of that width in plain numbers.
    """
    for name in OUTPUT_NAMES:
        layer: Any = getattr(module, name, None)
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.dtype.is_floating_point:
            continue
        turned = type(layer).__name__ == "Conv1D"
        if weight.shape[0 if turned else 1] == n_inputs:
            return layer, turned
    return None


@contextmanager
def with_output_weights(model: nn.Module, weights: Weights) -> Iterator[None]:
    """The model computes with these W_O ([outputs, inputs], by layer); afterwards it is bit for bit as before.

    Its identity stays the one it had, so codecs made for it are accepted inside.
    """
    own = {layer: parameter.detach().clone() for layer, parameter in _parameters(model, weights).items()}
    with identity_held(model):
        try:
            bake(model, weights)
            yield
        finally:
            for layer, parameter in _parameters(model, weights).items():
                with torch.no_grad():
                    parameter.copy_(own[layer])


def bake(model: nn.Module, weights: Weights) -> None:
    """Write these W_O into the model; ValueError, naming the layer, where there is no projection of that shape."""
    for layer, parameter in _parameters(model, weights).items():
        with torch.no_grad():
            parameter.copy_(weights[layer].to(parameter))


def output_weights(model: nn.Module, layers: Mapping[int, int]) -> dict[int, Float[Tensor, "hidden n"]]:
    """Copies of W_O, [outputs, inputs], of `layers`: {layer: inputs of its projection}."""
    return {
        layer: _stored(_attention(model, layer), layer, n_inputs).detach().clone() for layer, n_inputs in layers.items()
    }


def _parameters(model: nn.Module, weights: Weights) -> dict[int, Tensor]:
    found = {layer: _stored(_attention(model, layer), layer, weights[layer].shape[1]) for layer in weights}
    for layer, parameter in found.items():
        if parameter.shape != weights[layer].shape:
            raise ValueError(
                f"layer {layer}: W_O is {tuple(parameter.shape)}, not {tuple(weights[layer].shape)}; "
                "the weights are those of another model"
            )
    return found


def _attention(model: nn.Module, layer: int) -> nn.Module:
    """The module of a layer that has an output projection: the innermost one with that index."""
    found = [m for m in model.modules() if getattr(m, "layer_idx", None) == layer and _has_projection(m)]
    if not found:
        raise ValueError(f"layer {layer} of {type(model).__name__} has no attention with an output projection")
    return found[-1]


def _has_projection(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), nn.Module) for name in OUTPUT_NAMES)


def _stored(module: nn.Module, layer: int, n_inputs: int) -> Tensor:
    found = output_layer(module, n_inputs)
    if found is None:
        raise ValueError(
            f"layer {layer}: {type(module).__name__} has no output projection of {n_inputs} inputs in plain numbers"
        )
    weight = found[0].get_parameter("weight")
    return weight.mT if found[1] else weight
