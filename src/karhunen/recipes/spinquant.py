"""SpinQuant (arXiv:2405.16406), the KV part: QuaRot with learned rotations instead of the Hadamard matrix.

Reproduced: the places where QuaRot rotates (post-RoPE keys, values), asymmetric ranges per token and group, steps by
the Cayley transform that stay on the orthogonal matrices. Departs, to be cheap: no text and no forward takes part. Each
head's rotation is searched for in 100 steps that shorten the ranges of Gaussian vectors of the calibrated mean and
covariance, where the paper descends the model's cross-entropy; what is kept is the best of every tenth iterate and of
the two starts (Hadamard, Hadamard behind the principal axes), which may be a start. Nothing enters the weights.
"""

from karhunen.allocation.uniform import Uniform
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.transforms.learned_rotation import LearnedRotation
from karhunen.windows.sink_recent import SinkRecent

RATES = {4: {"bits": 4}, 8: {"bits": 2, "clip": 0.94}, 12: {"bits": 1, "clip": 0.79}}  # clips: as QuaRot


def spinquant(bits: int = 4, group: int = 128, clip: float = 1.0, sink: int = 4, recent: int = 128) -> Recipe:
    """QuaRot's options."""
    side = Side(
        transform=LearnedRotation(group),
        allocation=Uniform(bits),
        quantizer=Affine(PerToken(group), clip=clip, fit_group=True),
    )
    return Recipe("spinquant", key=side, value=side, window=SinkRecent(sink, recent))
