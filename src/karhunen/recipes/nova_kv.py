"""NOVA-KV (arXiv:2608.04074): keys transformed so that squared error is logit error, then group VQ; values rotated.

Reproduced: the query-metric KLT of post-RoPE keys, 4 coefficients in 256 entries, stratified groups, a gain per token,
float8 tables; values rotated to the axes of VᵀSᵀSV, Hadamard, bit-reversed, at 2 bits with clipping. The mean of the
keys is constant for a query and drops out of a softmax without learned sinks; it is stored once and added back when
keys are decoded, which holds for every model. `value_axes="scores"` is the seed's shipped approximation.
"""

from typing import Literal

from karhunen.allocation.uniform import Uniform
from karhunen.metrics.query import QueryMetric
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Recipe, Side
from karhunen.transforms.attended import AttendedAxes
from karhunen.transforms.bit_reversal import BitReversal
from karhunen.transforms.chain import ChainSpec
from karhunen.transforms.klt import KLT
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent

# the paper's clip is that of 2 bits; at 4 and 1 the least error of a Gaussian
RATES = {4: {"value_bits": 4, "clip": 1.0}, 8: {}, 12: {"bits": 1, "value_bits": 1, "clip": 0.79}}


def nova_kv(
    bits: int = 2,
    value_bits: int = 2,
    clip: float = 0.92,
    value_axes: Literal["outputs", "received", "scores"] = "outputs",
    sink: int = 64,
    recent: int = 256,
) -> Recipe:
    """`bits` per key coefficient by groups of 4, `value_bits` per value coefficient with one range per token."""
    return Recipe(
        "nova_kv",
        key=Side(
            metric=QueryMetric(),
            transform=KLT(),
            allocation=Uniform(bits),
            quantizer=GroupVQ(size=4, entries="float8_e5m2"),
        ),
        value=Side(
            transform=ChainSpec((AttendedAxes(value_axes), Hadamard(), BitReversal())),
            allocation=Uniform(value_bits),
            quantizer=Affine(PerToken(), clip=clip),
        ),
        window=SinkRecent(sink, recent),
    )
