"""OSCAR (arXiv:2605.17757): rotations from what attention reads, then two bits per token.

Reproduced: keys by U_Q · H · P (query covariance, Hadamard, bit reversal), values by the axes of VᵀSᵀSV · H · P,
clipping at the 0.96 and 0.92 quantiles, one asymmetric range per token and head, 64 sinks and 256 recent tokens
exact.
Departs: clips are the paper's and not searched for each layer; nothing is folded into the weights.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.metrics.query import QueryMetric
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.attended import AttendedAxes
from karhunen.transforms.bit_reversal import BitReversal
from karhunen.transforms.chain import ChainSpec
from karhunen.transforms.metric_axes import MetricAxes
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent

# the paper's clips are those of 2 bits; at 4 and 1 the least error of a Gaussian
RATES = {
    4: {"bits": 4, "clip": 1.0, "value_clip": 1.0},
    8: {"bits": 2},
    12: {"bits": 1, "clip": 0.79, "value_clip": 0.79},
}


def oscar(bits: int = 2, clip: float = 0.96, value_clip: float = 0.92, sink: int = 64, recent: int = 256) -> Recipe:
    """`bits` for all; `clip` and `value_clip` are the quantiles at which ranges end."""
    return Recipe(
        "oscar",
        key=Side(
            metric=QueryMetric(),
            transform=ChainSpec((MetricAxes(), Hadamard(), BitReversal())),
            allocation=Uniform(bits),
            quantizer=Affine(PerToken(), clip=clip),
        ),
        value=Side(
            transform=ChainSpec((AttendedAxes(), Hadamard(), BitReversal())),
            allocation=Uniform(bits),
            quantizer=Affine(PerToken(), clip=value_clip),
        ),
        window=SinkRecent(sink, recent),
    )
