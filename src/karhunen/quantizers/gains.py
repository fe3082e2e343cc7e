"""A gain per token and head group takes the level out of a vector before it is quantized.

    y = gain · u,   gain = root mean square of y,   stored as float16 and rounded before u is formed
"""

import torch
from jaxtyping import Float, Float16
from torch import Tensor

from karhunen.quantizers.base import as_half

GAIN_BITS = 16


def split_gain(y: Float[Tensor, "b g t c"]) -> tuple[Float[Tensor, "b g t c"], Float16[Tensor, "b g t"]]:
    """(u, gain); a vector of zeros has gain 0 and stays zeros."""
    gain = as_half(y.square().mean(-1).sqrt())
    level = gain.double()[..., None]
    return torch.where(level > 0, y / torch.where(level > 0, level, 1.0), 0.0), gain


def apply_gain(u: Float[Tensor, "b g t c"], gain: Float16[Tensor, "b g t"]) -> Float[Tensor, "b g t c"]:
    """The mirror of `split_gain`."""
    return u * gain.to(u.dtype)[..., None]
