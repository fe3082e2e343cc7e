"""Byte codes: groups of variable size whose water-filled rates sum to 8 bits, one 256-entry codebook each.

    coefficients by decreasing rate, each dealt to the byte that is least full:
    | 4.1  2.0 1.2 0.7 | 3.9  2.4  1.3 0.4 | 3.0 2.6 1.9 0.5 | ...        one byte = one group = one table look-up

Many weak coefficients share a byte with a strong one; one above 8 bits takes a byte alone and its remainder shares
another (a residual). Every token takes the same number of bytes, and no rate is
rounded. Groups of equal volume let a fixed width reach the variable-rate optimum (NOVA-KV, arXiv:2608.04074);
water-filling says how large they are (SPECTRA, arXiv:2608.07915). The combination is this project's.
"""

from dataclasses import dataclass
from typing import Literal, final

from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import QuantizerData, QuantizerSpec
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.gains import GAIN_BITS, GainKind
from karhunen.quantizers.planes import Plane, Training, train_bytes
from karhunen.values import refuse_unless_one_of

TableKind = Literal["free", "overlapping", "additive"]
INDEX_BITS: dict[str, tuple[int, int]] = {"free": (8, 0), "overlapping": (6, 6), "additive": (4, 4)}
"""Bits of a byte by which its two look-ups are chosen (karhunen.kernels.byte_tables.Lookups)."""

BYTE_BITS = 8
LOSS = ((0.0, 1.0), (0.5, 1.08), (1.0, 1.25), (1.5, 1.43), (2.0, 1.6), (3.0, 2.0), (4.0, 2.45), (5.0, 4.1), (6.0, 7.3))
"""(bits per coefficient of a head, distortion over the Gaussian rate-distortion function), of float16 tables. Those of
int8 measure 2 to 25 % more (benchmarks/byte_efficiency.py, results/measured/byte_efficiency-smollm2.json); the factors
stay as they are, since others would move the bytes of every codec."""
LEAST_PIECE_BITS = 0.5  # a remainder below this is not worth a place in another byte


@final
@dataclass(frozen=True)
class ByteVQ(QuantizerSpec):
    """Codebooks trained by k-means on calibration coefficients; `gain` says how a token's level is stored,
    `loss` what the allocation is told of their efficiency."""

    gain: GainKind = "none"
    gaussian_share: float = 0.0
    n_iterations: int = 10
    max_samples: int = 16384
    seed: int = 0
    loss: tuple[tuple[float, float], ...] = LOSS
    tables: TableKind = "free"
    needs_moments = True
    needs_samples = True

    def __post_init__(self) -> None:
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))
        refuse_unless_one_of("tables", self.tables, tuple(INDEX_BITS))

    def cost(self, c: int) -> RateCost:
        """Real-valued rates whose sum over a head group is whole bytes."""
        return RateCost(
            token_bits=GAIN_BITS[self.gain], integer=False, max_bits=24.0, unit_bits=BYTE_BITS, loss=self.loss
        )

    def fit(self, data: QuantizerData) -> ByteQuantizer:
        """Cuts the rates into bytes and trains their tables."""
        planes = [plane for head, rates in enumerate(data.rates) for plane in cut_into_bytes(rates, head)]
        how = Training(self.n_iterations, self.seed, self.max_samples, self.gaussian_share)
        return train_bytes(planes, data, self.gain, how, INDEX_BITS[self.tables])


def cut_into_bytes(rates: Float[Tensor, " c"], group: int = 0) -> tuple[Plane, ...]:
    """The bytes of one head group; as many as the rates' sum holds, rounded, and at least one.

    A coefficient above 8 bits takes whole bytes first and what is left of it is dealt with the others: largest rate
    first, each to the byte that is least full (longest processing time first; Graham, 1969).
    """
    n_bytes = max(1, round(float(rates.sum()) / BYTE_BITS))
    scale = n_bytes * BYTE_BITS / max(float(rates.sum()), 1e-30)
    whole: list[Plane] = []
    pieces: list[tuple[float, int, int]] = []  # rate, coefficient, stage
    for i, rate in enumerate((rates * scale).tolist()):
        n_whole = int(rate // BYTE_BITS)
        whole += [Plane(group, (i,), BYTE_BITS, stage) for stage in range(n_whole)]
        if rate - n_whole * BYTE_BITS > (LEAST_PIECE_BITS if n_whole else 0):
            pieces.append((rate - n_whole * BYTE_BITS, i, n_whole))
    shared: list[list[tuple[float, int, int]]] = [[] for _ in range(n_bytes - len(whole))]
    fill = [0.0] * len(shared)
    for piece in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        if not shared:
            break
        byte = fill.index(min(fill))
        shared[byte].append(piece)
        fill[byte] += piece[0]
    dealt = [Plane(group, tuple(i for _, i, _ in byte), BYTE_BITS, max(s for *_, s in byte)) for byte in shared if byte]
    return (*whole, *dealt)
