"""KVQuant (arXiv:2401.18079): pre-RoPE keys per channel, values per token, non-uniform levels, outliers apart.

Reproduced: levels by k-means weighted with the Fisher information, calibrated channel ranges for pre-RoPE keys,
ranges of each token for values, 1 % of a vector's coefficients sparse (16-bit index, float16 value), the first token
exact, no recent window. Departs: one table for all heads of a layer's side; the Fisher weight is a channel's, not an
element's; a token keeps a fixed number of outliers, over its heads; a value's range is the spread of its inliers, not
their extremes.
"""

from functools import partial

from karhunen.allocation.uniform import Uniform
from karhunen.frames.rope_frame import RopeFrame
from karhunen.metrics.fisher import FisherMetric
from karhunen.quantizers.non_uniform import NonUniform
from karhunen.recipe import Recipe, Side
from karhunen.transforms.metric_scale import MetricScale
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 3}, 8: {"bits": 2, "outlier_share": 0.0}}


def kvquant(bits: int = 3, outlier_share: float = 0.01, sink: int = 1, recent: int = 0) -> Recipe:
    """`bits` per coefficient, and 32 bits for each outlier."""
    side = partial(Side, metric=FisherMetric(), transform=MetricScale(), allocation=Uniform(bits))
    return Recipe(
        "kvquant",
        key=side(frame=RopeFrame(1), quantizer=NonUniform("channel", outlier_share)),
        value=side(quantizer=NonUniform("token", outlier_share)),
        window=SinkRecent(sink, recent),
    )
