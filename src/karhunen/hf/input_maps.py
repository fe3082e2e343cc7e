"""The linear maps of an attention module from hidden states to keys and values, as plain numbers."""

from typing import Any

import torch
from torch import Tensor, nn

from karhunen.device import HOST
from karhunen.statistics.need import Slot
from karhunen.statistics.projection import Projection

NAMES: dict[Slot, tuple[str, ...]] = {"key": ("k_proj", "wk", "key"), "value": ("v_proj", "wv", "value")}


def linear_map(module: nn.Module, slot: Slot) -> Projection | None:
    """The projection of an attention module in float32, None if it has none in plain numbers."""
    for name in NAMES[slot]:
        layer: Any = getattr(module, name, None)
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.dtype.is_floating_point:
            flat = torch.zeros(weight.shape[0], device=HOST) if bias is None else bias.detach().float().cpu()
            return Projection(weight.detach().float().mT.cpu().contiguous(), flat)
    return None
