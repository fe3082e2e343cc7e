"""A gain per token and head group takes the level out of a vector before it is quantized.

    y = gain · u,   gain = root mean square of y,   stored and rounded before u is formed

`float16` takes two bytes. `log8` takes one: the code is the logarithm in steps of 1/12 octave (6 %), and since u is
formed with the decoded gain the step is no error, only a slightly different u.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.quantizers.base import as_half

GainKind = Literal["none", "float16", "log8"]

GAIN_BITS: dict[str, int] = {"none": 0, "float16": 16, "log8": 8}
LOG_STEPS = 12  # per octave
LOG_ZERO = 150  # the code of gain 1; codes 1 … 255 reach from 2^-12.4 to 2^8.75, code 0 is gain 0


def split_gain(y: Float[Tensor, "b g t c"], kind: GainKind) -> tuple[Float[Tensor, "b g t c"], Tensor]:
    """(u, stored gain [b g t]); a vector of zeros has gain 0 and stays zeros."""
    rms = y.square().mean(-1).sqrt()
    if kind == "log8":
        code = (rms.log2() * LOG_STEPS + LOG_ZERO).round().clamp(1, 255)
        stored = torch.where(rms > 0, code, 0.0).to(torch.uint8)
    else:
        stored = as_half(rms)
    level = gain_values(stored).to(y.dtype)[..., None]
    return torch.where(level > 0, y / torch.where(level > 0, level, 1.0), 0.0), stored


def gain_values(stored: Tensor) -> Tensor:
    """The gains that `stored` stands for, float32: the power is taken in float64 and rounded once, since instruction
    sets round a float32 power to either neighbour, and encoding divides by it."""
    if stored.dtype == torch.uint8:
        power = ((stored.double() - LOG_ZERO) / LOG_STEPS).exp2().float()
        return torch.where(stored > 0, power, 0.0)
    return stored.float()


def gain_levels(device: torch.device) -> Float[Tensor, " 256"]:
    """What each byte of `log8` means."""
    return gain_values(torch.arange(256, dtype=torch.uint8, device=device))


def apply_gain(u: Float[Tensor, "b g t c"], stored: Tensor) -> Float[Tensor, "b g t c"]:
    """The mirror of `split_gain`."""
    return u * gain_values(stored).to(u.dtype)[..., None]
