"""Byte codes: groups of variable size whose water-filled rates sum to 8 bits, one 256-entry codebook each.

    coefficients by decreasing rate, laid end to end, cut every 8 bits:
    | 4.1    3.9 | 3.0  2.6  2.4 | 2.0 1.9 1.6 1.3 1.2 | ...        one byte = one group = one table look-up

A strong coefficient shares its byte with few others, a dozen weak ones share one; a coefficient cut in two is coded by
the first byte and its remainder by the next (a residual). Every token takes the same number of bytes, and no rate is
rounded. Groups of equal volume let a fixed width reach the variable-rate optimum (NOVA-KV, arXiv:2608.04074);
water-filling says how large they are (SPECTRA, arXiv:2608.07915). The combination is this project's.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import QuantizerData, QuantizerSpec
from karhunen.quantizers.gains import GAIN_BITS, GainKind
from karhunen.quantizers.planes import Plane, Training, train
from karhunen.quantizers.vector import VectorQuantizer
from karhunen.values import refuse_unless_one_of

BYTE_BITS = 8
LEAST_PIECE_BITS = 0.5  # a cut that would leave less than this on one side moves to the coefficient's edge


@final
@dataclass(frozen=True)
class ByteVQ(QuantizerSpec):
    """Codebooks trained by k-means on calibration coefficients; `gain` says how a token's level is stored."""

    gain: GainKind = "none"
    gaussian_share: float = 0.5
    n_iterations: int = 10
    max_samples: int = 16384
    seed: int = 0
    needs_moments = True
    needs_samples = True

    def __post_init__(self) -> None:
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))

    def cost(self, c: int) -> RateCost:
        """Real-valued rates whose sum over a head group is whole bytes."""
        return RateCost(token_bits=GAIN_BITS[self.gain], integer=False, max_bits=24.0, unit_bits=BYTE_BITS)

    def fit(self, data: QuantizerData) -> VectorQuantizer:
        """Cuts the rates into bytes and trains their tables."""
        planes = [plane for head, rates in enumerate(data.rates) for plane in cut_into_bytes(rates, head)]
        return train(planes, data, self.gain, Training(self.n_iterations, self.seed, self.max_samples, self.gaussian_share))


def cut_into_bytes(rates: Float[Tensor, " c"], group: int = 0) -> tuple[Plane, ...]:
    """The bytes of one head group; as many as the rates' sum holds, rounded, and at least one."""
    n_bytes = max(1, round(float(rates.sum()) / BYTE_BITS))
    scale = n_bytes * BYTE_BITS / max(float(rates.sum()), 1e-30)
    members: list[list[int]] = [[] for _ in range(n_bytes)]
    stage = [0] * n_bytes
    start = 0.0
    for i in rates.sort(descending=True, stable=True).indices.tolist():
        stop = start + float(rates[i]) * scale
        depth = 0
        for p in range(int(start / BYTE_BITS), n_bytes):
            piece = min(stop, (p + 1) * BYTE_BITS) - max(start, p * BYTE_BITS)
            if piece <= 0:
                break
            if piece >= min(LEAST_PIECE_BITS, (stop - start) / 2):
                members[p].append(i)
                stage[p] = max(stage[p], depth)
                depth = stage[p] + 1
        start = stop
    return tuple(Plane(group, tuple(m), BYTE_BITS, s) for m, s in zip(members, stage, strict=True) if m)
