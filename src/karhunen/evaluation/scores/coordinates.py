"""What the transform does to the coordinates, and how bits are spread over them: seen on text, averaged over layers.

    energy(f): share of the energy in the strongest fraction f of the coordinates of a head group
    correlation: mean |ρ_ij| over pairs of coordinates of a head group

Before: keys and values as the model caches them (keys after RoPE), per head. After: what the quantizer sees.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.codec import Codec, SideCodec
from karhunen.evaluation.results.composition import coefficient_bits
from karhunen.evaluation.scores.attention_error import Captured
from karhunen.statistics.need import SLOTS

FRACTIONS = tuple(i / 16 for i in range(17))


@final
@dataclass(frozen=True)
class Coordinates:
    """Of one side: curves at FRACTIONS of the coordinates; `bits` are those of the coordinate at that fraction, most
    bits first."""

    slot: str
    energy_before: tuple[float, ...]
    energy_after: tuple[float, ...]
    bits: tuple[float, ...]
    correlation_before: float
    correlation_after: float


def coordinates(codec: Codec, captured: Mapping[int, Captured]) -> list[Coordinates]:
    """Both sides; none if no coded layer was captured."""
    layers = [i for i in sorted(codec.layers) if i in captured]
    found: list[Coordinates] = []
    for slot in SLOTS if layers else ():
        seen = [
            _of_layer(codec.layers[i].side(slot), captured[i].key if slot == "key" else captured[i].value)
            for i in layers
        ]
        before, after, bits, rho_before, rho_after = (torch.stack(part).mean(0) for part in zip(*seen, strict=True))
        found.append(
            Coordinates(slot, _curve(before), _curve(after), _curve(bits), float(rho_before), float(rho_after))
        )
    return found


def _curve(values: Tensor) -> tuple[float, ...]:
    return tuple(round(v, 5) for v in values.tolist())


@torch.no_grad()
def _of_layer(side: SideCodec, x: Float[Tensor, "b h t d"]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    positions = torch.arange(x.shape[2], device=x.device)[None].expand(x.shape[0], -1)
    y = side.transform.forward(side.frame.forward(x, positions, side.rotary, side.mean))
    before, after = _covariance(x), _covariance(y)
    bits = coefficient_bits(side.quantizer, *y.shape[1::2]).sort(-1, descending=True).values.mean(0)
    at = (torch.tensor(FRACTIONS, device=bits.device) * (len(bits) - 1)).round().long()
    return _energy(before), _energy(after), bits[at], _correlation(before), _correlation(after)


def _covariance(x: Float[Tensor, "b g t c"]) -> Float[Tensor, "g c c"]:
    rows = x.double().transpose(0, 1).flatten(1, 2)
    rows = rows - rows.mean(1, keepdim=True)
    return rows.transpose(-1, -2) @ rows / rows.shape[1]


def _energy(covariance: Float[Tensor, "g c c"]) -> Float[Tensor, " n"]:
    variance = covariance.diagonal(dim1=-2, dim2=-1).sort(-1, descending=True).values
    total = torch.cat([torch.zeros_like(variance[:, :1]), variance.cumsum(-1)], dim=-1)
    share = (total / total[:, -1:].clamp_min(1e-300)).mean(0)
    at = torch.tensor(FRACTIONS, dtype=torch.float64, device=share.device) * (len(share) - 1)
    low, high = at.floor().long(), at.ceil().long()
    return share[low] + (share[high] - share[low]) * (at - low)


def _correlation(covariance: Float[Tensor, "g c c"]) -> Float[Tensor, ""]:
    scale = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt()
    rho = (covariance * scale[:, :, None] * scale[:, None]).abs()
    c = rho.shape[-1]
    return (rho.sum((-2, -1)) - rho.diagonal(dim1=-2, dim2=-1).sum(-1)).mean() / max(1, c * (c - 1))
