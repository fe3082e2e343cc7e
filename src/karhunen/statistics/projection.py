"""The linear map of a layer that makes keys (before RoPE, before a norm) or values of its hidden states.

x = h W + b
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.statistics.moments import Moments


@final
@dataclass(frozen=True)
class Projection:
    """Weights and bias in float32, all heads side by side."""

    weight: Float[Tensor, "hidden e"]
    bias: Float[Tensor, " e"]

    @property
    def augmented(self) -> Float[Tensor, "inputs e"]:
        """The weights with the bias as a last row, float64: (h, 1) times this is x."""
        return torch.cat([self.weight, self.bias[None]]).double()


def augmented_gram(activations: Moments) -> Float[Tensor, "inputs inputs"]:
    """E[(h, 1)ᵀ (h, 1)]: the Gram matrix of hidden states with a constant that carries biases."""
    second, mean = activations.second_moment[0], activations.mean[0]
    one = second.new_ones(1, 1)
    return torch.cat([torch.cat([second, mean[:, None]], dim=1), torch.cat([mean[None], one], dim=1)])
