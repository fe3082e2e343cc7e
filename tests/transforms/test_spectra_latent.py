"""SPECTRA's latent of the weights against the KLT of what they make, on a layer whose keys are h W + b."""

from dataclasses import dataclass

import pytest
import torch
from tests.closeness import DOUBLE, LAYERS, assert_near
from tests.synthetic import seeded
from torch import Tensor

from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need, Statistic
from karhunen.statistics.projection import Projection, augmented_gram
from karhunen.transforms.base import TransformData
from karhunen.transforms.klt import KLT
from karhunen.transforms.spectra_latent import (
    SpectraLatent,
    activations_need,
    factor,
    low_rank,
    projection_need,
    reconstruction_error,
)

HIDDEN, E, N = 24, 16, 400
ABOUT = Need("moments", "key", 1, joined=True, skip_tokens=4)


@dataclass(frozen=True)
class Layer:
    hidden: Tensor
    projection: Projection

    @property
    def keys(self) -> Tensor:
        return self.hidden.double() @ self.projection.weight.double() + self.projection.bias.double()

    @property
    def activations(self) -> Moments:
        return Moments.of(self.hidden[None])

    def data(self) -> TransformData:
        measured: dict[Need, Statistic] = {
            activations_need(ABOUT): self.activations,
            projection_need(ABOUT): self.projection,
        }
        return TransformData(1, E, Moments.of(self.keys[None]), None, ABOUT, measured)


def layer(bias: float = 1.0) -> Layer:
    """Hidden states with a falling spectrum and a mean, a projection of full rank."""
    mix = torch.randn(HIDDEN, HIDDEN, generator=seeded(1)) * torch.logspace(1, -1.5, HIDDEN)[:, None]
    hidden = torch.randn(N, HIDDEN, generator=seeded(2)) @ mix + 0.5
    weight = torch.randn(HIDDEN, E, generator=seeded(3))
    return Layer(hidden, Projection(weight, bias * torch.randn(E, generator=seeded(4))))


@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_the_latent_of_the_weights_is_the_uncentered_klt_of_the_keys(bias: float) -> None:
    """SVD of G^½ W̃ and the eigenvectors of E[kᵀk] are one basis: the constant in G carries the bias."""
    made = layer(bias)
    latent, klt = SpectraLatent().fit(made.data()), KLT(center=False).fit(made.data())
    assert_near(latent.matrix, klt.matrix, 1e-4)
    assert torch.equal(latent.mean, klt.mean)


def test_the_factor_is_the_singular_value_decomposition_of_the_weighted_weights() -> None:
    made = layer()
    values, vectors = torch.linalg.eigh(augmented_gram(made.activations))
    root = vectors * values.clamp_min(0).sqrt() @ vectors.mT
    _, strength, axes = torch.linalg.svd(root @ made.projection.augmented, full_matrices=False)
    found = factor(made.activations, made.projection)
    assert_near(found.strength, strength, 1e-8)  # a square root of an eigenvalue beside a singular value
    overlap = (axes @ found.axes).abs()
    assert_near(overlap, torch.eye(E).double(), 1e-5)


def test_the_balanced_latent_is_decorrelated_with_the_singular_values_as_energies() -> None:
    made = layer()
    latent = SpectraLatent(balanced=True).fit(made.data())
    second = Moments.of(latent.forward(made.keys[None, None])[0]).second_moment[0]
    strength = factor(made.activations, made.projection).strength
    assert_near(second, strength.diag(), 1e-4)
    assert_near(latent.inverse(latent.forward(made.keys[None])), made.keys[None], LAYERS)  # tables in float32


@pytest.mark.parametrize("rank", [1, 5, E])
def test_what_the_folded_weights_make_is_the_keys_cut_to_their_rank(rank: int) -> None:
    made = layer()
    latent = factor(made.activations, made.projection)
    down, up = low_rank(latent, made.projection, rank)
    c = made.hidden.double() @ down[:-1] + down[-1]
    kept = latent.axes[:, :rank]
    assert_near(c @ up, made.keys @ kept @ kept.mT, DOUBLE)
    energies = c.square().mean(0)
    assert torch.allclose(energies, latent.strength[:rank], rtol=1e-6)
    error = (made.keys - c @ up).square().sum() / made.keys.square().sum()
    weighted = reconstruction_error(made.activations, made.projection, rank)
    assert float(error) == pytest.approx(weighted, rel=1e-6, abs=1e-12)


def test_weighting_by_the_hidden_states_beats_the_weights_alone() -> None:
    """At half rank: the weights are white here, so that their own axes know nothing of the spectrum of h."""
    made = layer()
    with_gram, alone = (
        reconstruction_error(made.activations, made.projection, E // 2, weighted) for weighted in (True, False)
    )
    assert alone > 3 * with_gram


def test_a_frame_after_rope_is_refused() -> None:
    data = layer().data()
    other = TransformData(1, E, data.moments, None, Need("moments", "key", None, joined=True), data.measured)
    with pytest.raises(ValueError, match=r"before RoPE; use RopeFrame\(1, joined=True\)"):
        SpectraLatent().fit(other)
