"""What calibration refuses before the model runs on any text: numbers, token ids, needs the model cannot answer."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.hf.expansion import expanded_layers
from karhunen.hf.gradients import refuse_gradients
from karhunen.hf.suits import unseen_layers
from karhunen.statistics.need import Kind, Need
from karhunen.values import refuse_unless_a, refuse_unless_whole

OF_VECTORS: tuple[Kind, ...] = ("moments", "samples")
"""What the cache alone shows; all else takes attention that reads it as it is."""


def checked_needs(needs: object) -> tuple[Need, ...]:
    """Each once, in an order of their own; TypeError for what is no collection of needs, such as a recipe."""
    found = tuple(cast("Iterable[Any]", needs)) if isinstance(needs, Iterable) else (needs,)
    for need in found:
        refuse_unless_a("each of `needs`", need, Need, would="give recipe.needs()")
    return tuple(sorted(set(cast("tuple[Need, ...]", found)), key=repr))


def check_counts(**given: int) -> None:
    """ValueError, by name, unless every number is whole and 1 or more."""
    refuse_unless_whole(**given)
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name}={value} counts tokens; use 1 or more")


def check_ids(model: nn.Module, pieces: Sequence[Int[Tensor, " _"]]) -> None:
    """ValueError if the model does not know a token id."""
    table: Any = cast("Any", model).get_input_embeddings()
    n = int(getattr(table, "num_embeddings", 0) or 0)
    low, high = min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)
    if low < 0 or (n and high >= n):
        raise ValueError(
            f"token id {low if low < 0 else high} is outside the model's vocabulary of {n}; use the tokenizer that "
            "belongs to the model"
        )


def check_seen(model: nn.Module, needs: Iterable[Need], layers: Iterable[int]) -> None:
    """ValueError if a need asks how attention reads a layer whose attention does not read what is cached. Gradients go
    back through what is made of the cache, if that can be differentiated."""
    asking = [need for need in needs if need.kind not in OF_VECTORS]
    if not asking:
        return
    unseen = unseen_layers(model)
    expanded = expanded_layers(model) if unseen else frozenset[int]()
    for layer in layers:
        blind = [need for need in asking if need.kind != "gradients" or layer not in expanded]
        if layer in unseen and blind:
            instead = "the Fisher metric, such as karhunen, or" if layer in expanded else "a plain metric, such as"
            raise ValueError(
                f"layer {layer}: {blind[0]} cannot be measured: {unseen[layer]}; use a recipe with {instead} "
                f"{'a plain one, such as ' if layer in expanded else ''}int4, kivi or turboquant"
            )


def check_differentiable(model: nn.Module) -> None:
    """ValueError if gradients of the model's predictions cannot be had."""
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            "this recipe measures gradients, which torch.inference_mode() rules out; load the model and calibrate "
            "outside of it (torch.no_grad() does no harm)"
        )
    refuse_gradients(model)
    weight = getattr(cast("Any", model).get_output_embeddings(), "weight", None)
    if isinstance(weight, Tensor) and not weight.is_meta and not bool(weight.isfinite().all()):
        raise ValueError("the model's output embedding holds NaN or infinity, so it predicts nothing; load it anew")
