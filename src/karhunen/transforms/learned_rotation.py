"""A rotation learned so that the ranges of a token's coefficients are small, by descent on the orthogonal matrices.

    minimise E Σ_groups (max y − min y)²,  y = x Q;    Q ← (I + τ/2 A)⁻¹ (I − τ/2 A) Q,   A = G Qᵀ − Q Gᵀ,  G = ∂/∂Q

A uniform quantizer errs by step²/12 and its step is the range over 2^b − 1, so this is its error at every b.
Source: SpinQuant (arXiv:2405.16406) §3: stochastic Cayley descent (Li et al., arXiv:2002.01113).
Here:   the loss is the cache's own error, not the model's cross-entropy, on vectors drawn from the calibrated mean and
        covariance, so no weights are touched and minutes of training become seconds; the start is the better of a
        Hadamard rotation and one behind the principal axes; what is kept is the best iterate on vectors set apart.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.device import HOST
from karhunen.statistics.moments import Moments
from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec
from karhunen.transforms.klt import principal_axes, square_root
from karhunen.transforms.orthogonal import orthogonal_map
from karhunen.transforms.rotations import hadamard_matrix

N_JUDGING = 2048  # vectors set apart
JUDGE_EVERY = 10


@final
@dataclass(frozen=True)
class LearnedRotation(TransformSpec):
    """Cayley descent of `n_steps` on `n_vectors` fresh vectors each, for ranges over `group` coefficients."""

    group: int | None = None
    n_steps: int = 100
    n_vectors: int = 256
    rate: float = 0.3
    seed: int = 0
    needs_moments = True

    def fit(self, data: TransformData) -> AffineMap:
        """Never worse than the Hadamard rotation on the vectors set apart."""
        moments = data.require_moments()
        generator = torch.Generator(HOST).manual_seed(self.seed)
        group = self.group if self.group and data.d % self.group == 0 else data.d
        apart = drawn_vectors(moments, N_JUDGING, generator)
        hadamard = hadamard_matrix(data.d).to(data.device).expand(data.g, -1, -1)
        best, least = hadamard, mean_squared_range(apart @ hadamard, group)
        best, least = _better(best, least, principal_axes(moments.second_moment) @ hadamard, apart, group)
        q = best
        for step in range(self.n_steps):
            x = drawn_vectors(moments, self.n_vectors, generator)
            q = cayley_step(q, x, group, self.rate * (1 - step / self.n_steps))
            if step % JUDGE_EVERY == JUDGE_EVERY - 1:
                best, least = _better(best, least, q, apart, group)
        return orthogonal_map(best)


def drawn_vectors(moments: Moments, n: int, generator: torch.Generator) -> Float[Tensor, "g n d"]:
    """Gaussian vectors of the measured mean and covariance, float64."""
    root, _ = square_root(moments.covariance)
    g, d = moments.sum.shape
    normal = torch.randn(g, n, d, generator=generator, dtype=torch.float64, device=HOST).to(root.device)
    return normal @ root + moments.mean[:, None]


def mean_squared_range(y: Float[Tensor, "g n d"], group: int) -> Float[Tensor, " g"]:
    """Mean over vectors and groups of (max − min)²."""
    groups = y.unflatten(-1, (-1, group))
    return (groups.amax(-1) - groups.amin(-1)).square().mean((1, 2))


def cayley_step(
    q: Float[Tensor, "g d d"], x: Float[Tensor, "g n d"], group: int, size: float
) -> Float[Tensor, "g d d"]:
    """One step of length `size` down the loss, along the orthogonal matrices."""
    with torch.enable_grad():
        point = q.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(mean_squared_range(x @ point, group).sum(), point)
    turn = gradient @ q.mT
    turn = turn - turn.mT
    turn = turn * (size / torch.linalg.matrix_norm(turn).clamp_min(1e-300))[:, None, None]
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return torch.linalg.solve(eye + turn / 2, (eye - turn / 2) @ q)


def _better(best: Tensor, least: Tensor, q: Tensor, apart: Tensor, group: int) -> tuple[Tensor, Tensor]:
    loss = mean_squared_range(apart @ q, group)
    return torch.where((loss < least)[:, None, None], q, best), torch.minimum(loss, least)
