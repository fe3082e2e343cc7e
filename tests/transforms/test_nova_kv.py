"""The theory of NOVA-KV: one transform makes squared error logit error, and what follows from that."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.closeness import assert_near
from tests.synthetic import cached, measure, rotary, seeded, vectors
from torch import Tensor

from karhunen.allocation.uniform import Uniform
from karhunen.evaluation.scores.key_distortion import logit_distortion
from karhunen.frames.rope_frame import RopeFrame
from karhunen.metrics.query import QueryMetric
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.quantizers.group_vq import GroupVQ
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.transforms.attended import AttendedAxes
from karhunen.transforms.base import TransformData
from karhunen.transforms.bit_reversal import BitReversal, reversed_order
from karhunen.transforms.identity import Identity
from karhunen.transforms.klt import KLT
from karhunen.transforms.rotations import Hadamard
from karhunen.windows.sink_recent import SinkRecent

SHAPE = LayerShape("full", n_kv_heads=2, n_query_heads=4, key_dim=32, value_dim=32)
SINK = 4


def queries(n: int, seed: int = 0) -> Tensor:
    """Of both heads, of another spectrum than the keys': [h n d]."""
    mix = torch.randn(32, 32, generator=seeded(11)) * torch.logspace(0.3, -1.2, 32)
    return torch.randn(2, n, 32, generator=seeded(seed)) @ mix


@cache
def statistics(side: Side) -> Statistics:
    """Keys after RoPE with the correlations of a layer, and queries of their own."""
    recipe = Recipe("nova", side, Side(), SinkRecent(SINK, 0))
    key, value = cached(SHAPE, 1, 3000, seed=3)
    turn = rotary(32)
    measured = {
        need: Moments.of(queries(2000)) if need.kind == "queries" else measure(need, SHAPE, key, value, turn)
        for need in recipe.needs()
    }
    layer = LayerStatistics(turn, None, 1.0, 3000, measured)
    return Statistics(ModelIdentity("synthetic", "c", "w", (SHAPE,)), {0: layer}, ("synthetic",))


def test_squared_error_of_coefficients_is_the_expected_squared_logit_error() -> None:
    """The generalised Parseval relation ‖r − r̂‖² = E (qᵀ(k − k̂))², over the very queries of M, to 1e-6 relative."""
    q, k = queries(500).double(), cached(SHAPE, 1, 700, seed=1)[0][0]
    metric = Moments.of(q).second_moment
    transform = KLT().fit(TransformData(2, 32, Moments.of(k), metric))
    r = transform.forward(k[None])
    step = 0.3 * r.std()
    coded = (r / step).round() * step
    back = transform.inverse(coded)[0]
    in_code_space = (r - coded).square().sum(-1)[0]
    logit_error = torch.einsum("hmd,hnd->hmn", q, k.double() - back).square().mean(1)
    assert torch.allclose(in_code_space.mean(-1), logit_error.mean(-1), rtol=1e-6)
    torch.testing.assert_close(in_code_space, logit_error, rtol=2e-5, atol=0)


def test_the_transform_is_not_orthogonal_and_decorrelates() -> None:
    q, k = queries(500), cached(SHAPE, 1, 700, seed=1)[0][0]
    transform = KLT().fit(TransformData(2, 32, Moments.of(k), Moments.of(q).second_moment))
    gram = transform.matrix.mT @ transform.matrix
    assert (gram - gram.diagonal(dim1=-2, dim2=-1).diag_embed()).abs().max() > 0.1
    spread = Moments.of(transform.forward(k[None])[0]).covariance
    variance = spread.diagonal(dim1=-2, dim2=-1)
    assert_near(spread, variance.diag_embed(), 1e-5)
    assert bool((variance.diff(dim=-1) <= 1e-9).all())


def test_the_mean_key_drops_out_of_the_softmax_but_not_beside_a_sink() -> None:
    """qᵀμ is one number for all tokens of a query; a learned sink has a logit of its own that it moves against."""
    q, k = torch.randn(2, 5, 8, generator=seeded(0)).double(), torch.randn(2, 40, 8, generator=seeded(1)).double() + 2
    mean = k.mean(1, keepdim=True)
    whole, without = q @ k.mT, q @ (k - mean).mT
    assert torch.allclose(whole.softmax(-1), without.softmax(-1))
    sink = torch.zeros(2, 5, 1, dtype=torch.float64)
    beside = [torch.cat([scores, sink], -1).softmax(-1)[..., :-1] for scores in (whole, without)]
    assert float((beside[0] - beside[1]).abs().max()) > 1e-2


GROUPS = GroupVQ(size=4, gain="none", n_iterations=8)
AFTER = Side(metric=QueryMetric(), transform=KLT(), allocation=Uniform(2), quantizer=GROUPS)


def test_product_quantization_after_the_transform_beats_it_before_at_equal_bits() -> None:
    """Two bits per coefficient by groups of four, in both coordinates; and the flat scalar at the same rate."""
    found = statistics(AFTER)
    after = logit_distortion(AFTER, found, 0, SINK)
    raw = replace(AFTER, transform=Identity())
    before = logit_distortion(raw, found, 0, SINK)
    assert after < 0.5 * before


def test_a_flat_scalar_fails_on_the_transform_that_is_not_orthogonal() -> None:
    """At two bits with one range per token, weak coefficients are lost in the range of the strong ones; the same
    transform with group VQ, or a Hadamard rotation with the same scalar, is far better."""
    found = statistics(AFTER)
    scalar = replace(AFTER, quantizer=Affine(PerToken()))
    flat, vq = logit_distortion(scalar, found, 0, SINK), logit_distortion(AFTER, found, 0, SINK)
    assert flat > 3 * vq
    rotated = replace(scalar, transform=Hadamard())
    assert flat > logit_distortion(rotated, found, 0, SINK) or flat > 10 * vq


@pytest.mark.parametrize("frame", [RopeFrame(joined=True), RopeFrame(1, center=True)])
def test_distortion_of_a_joined_or_centered_frame_is_refused(frame: RopeFrame) -> None:
    with pytest.raises(ValueError, match="neither joined nor centered"):
        logit_distortion(replace(AFTER, frame=frame), statistics(AFTER), 0, SINK)


# the value path


ABOUT = Need("moments", "value", skip_tokens=SINK)


def value_data(outputs: Tensor) -> TransformData:
    measured = {need: Moments.of(outputs) for need in AttendedAxes().needs(ABOUT)}
    return TransformData(2, 32, Moments.of(outputs), None, ABOUT, measured)


def test_values_turn_to_the_axes_of_attentions_outputs() -> None:
    outputs = vectors(1, 2, 400, 32)[0]
    axes = AttendedAxes().fit(value_data(outputs))
    turned = Moments.of(axes.forward(outputs[None])[0]).second_moment
    energies = turned.diagonal(dim1=-2, dim2=-1)
    assert_near(turned, energies.diag_embed(), 1e-5)
    assert bool((energies.diff(dim=-1) <= 1e-9).all())
    assert not axes.mean.any()


def test_the_published_value_path_is_a_rotation_that_spreads_energy_evenly() -> None:
    """Uncorrelated coordinates, summed with signs ±1/√d: each of the 32 holds the same energy."""
    spec = make("nova_kv").value
    assert spec is not None
    outputs = vectors(1, 2, 400, 32)[0]
    chain = spec.transform.fit(value_data(outputs))
    y = chain.forward(outputs[None].double())
    assert torch.allclose(y.norm(dim=-1), outputs[None].double().norm(dim=-1), rtol=1e-5)
    energies = y[0].square().mean(1)
    assert torch.allclose(energies, energies.mean(-1, keepdim=True).expand_as(energies), rtol=1e-4)


@pytest.mark.parametrize("d", [1, 8, 12, 64, 80])
def test_bit_reversal_is_a_permutation(d: int) -> None:
    assert sorted(reversed_order(d)) == list(range(d))
    x = torch.randn(1, 1, 3, d, generator=seeded(0)).double()
    transform = BitReversal().fit(TransformData(1, d))
    assert torch.equal(transform.inverse(transform.forward(x)), x)
    if d in (1, 8, 64):
        assert torch.equal(transform.forward(transform.forward(x)), x), "at a power of two it is its own inverse"


def test_axes_of_keys_or_of_another_source_are_refused() -> None:
    with pytest.raises(ValueError, match="AttendedAxes are those of values; use the KLT for keys"):
        AttendedAxes().needs(Need("moments", "key"))
    with pytest.raises(ValueError, match="value_axes 'guess'; known: outputs, received, scores"):
        make("nova_kv:value_axes=guess")
