"""SpinQuant (arXiv:2405.16406), the KV part: QuaRot with learned rotations instead of the Hadamard matrix.

Reproduced: stochastic Cayley descent on the orthogonal matrices, asymmetric ranges per token and group, at the places
where QuaRot rotates (post-RoPE keys, values). Departs, to be cheap: each head's rotation minimises the quantizer's
own error on vectors of the calibrated mean and covariance, not the model's cross-entropy; nothing enters the weights.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.learned_rotation import LearnedRotation
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4}, 8: {"bits": 2}, 12: {"bits": 1}}


def spinquant(bits: int = 4, group: int = 128, clip: float = 1.0, sink: int = 4, recent: int = 128) -> Recipe:
    """QuaRot's options."""
    side = Side(
        transform=LearnedRotation(group),
        allocation=Uniform(bits),
        quantizer=Affine(PerToken(group), clip=clip, fit_group=True),
    )
    return Recipe("spinquant", key=side, value=side, window=SinkRecent(sink, recent))
