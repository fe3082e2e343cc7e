"""SPECTRA's latent: the projection's own low-rank factors, weighted by the hidden states that it reads.

    SVD of G^½ W = U Σ Vᵀ,   W ≈ W_down W_up,   W_down = G^{−½} U_r Σ_r^½,   W_up = Σ_r^½ V_rᵀ
    c = h W_down = x V Σ^{−½},   E[cᵀc] = Σ

Source: SPECTRA (arXiv:2608.07915). G = E[(h, 1)ᵀ(h, 1)]: the constant carries the biases of W.
Here: c is had from the cached vector x, so that the codec codes what the folded model would cache. `balanced` keeps the
paper's scale; otherwise c = x V, whose squared error is that of x and which spans the same space.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.statistics.projection import Projection, augmented_gram
from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec
from karhunen.transforms.klt import principal_axes

# Of the largest eigenvalue: directions in which the hidden states never move are not told apart.
LEAST_EIGENVALUE = 1e-12


@final
@dataclass(frozen=True)
class SpectraLatent(TransformSpec):
    """The latent of a layer's keys (before RoPE) or values, all heads joined, by decreasing energy."""

    balanced: bool = False
    needs_moments = True

    def needs(self, about: Need) -> frozenset[Need]:
        """The Gram matrix of the hidden states, and the projection."""
        return frozenset({activations_need(about), projection_need(about)})

    def fit(self, data: TransformData) -> AffineMap:
        """ValueError unless the frame is the joined one before RoPE."""
        if not data.about.joined or (data.about.slot == "key" and data.about.block_tokens != 1):
            raise ValueError("SpectraLatent is that of a whole layer before RoPE; use RopeFrame(1, joined=True)")
        activations = data.require(activations_need(data.about), Moments)
        latent = factor(activations, data.require(projection_need(data.about), Projection))
        scale = latent.strength.clamp_min(latent.strength[0] * LEAST_EIGENVALUE).sqrt() if self.balanced else 1.0
        matrix, inverse = latent.axes / scale, (latent.axes * scale).mT
        return AffineMap(
            matrix.new_zeros(1, data.d, dtype=torch.float32), matrix[None].float(), inverse[None].float().contiguous()
        )


@final
@dataclass(frozen=True)
class Latent:
    """Right factor of G^½ W̃ in full: x V are the coordinates, `strength` the singular values Σ (energies are Σ²)."""

    axes: Float[Tensor, "e e"]
    strength: Float[Tensor, " e"]


def factor(activations: Moments, projection: Projection) -> Latent:
    """V and Σ of G^½ W̃, largest first, signs fixed by rule: from W̃ᵀ G W̃, which has the same V and Σ²."""
    weight = projection.augmented
    energy = weight.mT @ augmented_gram(activations) @ weight
    axes = principal_axes(energy[None])[0]
    return Latent(axes, (axes * (energy @ axes)).sum(0).clamp_min(0).sqrt())


def reconstruction_error(activations: Moments, projection: Projection, rank: int, weighted: bool = True) -> float:
    """E‖x − x̂‖² ÷ E‖x‖² at a rank, with the axes of G^½ W̃ or of W̃ alone: what G-weighting is worth."""
    weight = projection.augmented
    energy = weight.mT @ augmented_gram(activations) @ weight
    axes = principal_axes((energy if weighted else weight.mT @ weight)[None])[0][:, rank:]
    return float((axes * (energy @ axes)).sum() / energy.trace())


def low_rank(
    latent: Latent, projection: Projection, rank: int
) -> tuple[Float[Tensor, "inputs r"], Float[Tensor, "r e"]]:
    """(W_down with its bias as last row, W_up) in float64, at the paper's scale: W_down = W̃ V_r Σ_r^{−½}."""
    kept = latent.axes[:, :rank]
    scale = latent.strength[:rank].clamp_min(latent.strength[0] * LEAST_EIGENVALUE).sqrt()
    return projection.augmented @ kept / scale, (kept * scale).mT


def activations_need(about: Need) -> Need:
    """Both sides of a layer read the same hidden states: they share one statistic."""
    return replace(about, kind="activations", slot="key", block_tokens=None, joined=True, stride=1)


def projection_need(about: Need) -> Need:
    """The weights of one side, whatever tokens were read."""
    return Need("projection", about.slot)
