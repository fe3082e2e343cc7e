"""Product and residual vector quantization: any number of sub-vectors, any depth, groups of equal volume."""

from itertools import pairwise

import pytest
import torch
from tests.synthetic import seeded
from torch import Tensor

from karhunen.quantizers.base import Quantizer, QuantizerData
from karhunen.quantizers.group_vq import GroupVQ, group_order
from karhunen.statistics.moments import Moments


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def trained(spec: GroupVQ, x: Tensor, bits: float) -> Quantizer:
    return spec.fit(QuantizerData(torch.full((x.shape[0], x.shape[2]), bits), Moments.of(x), x))


def mse(quantizer: Quantizer, x: Tensor) -> float:
    return float((quantizer.decode(quantizer.encode(x[None])) - x[None]).square().mean())


@pytest.mark.parametrize(
    ("size", "depth", "bits", "widths"),
    [
        (8, 1, 1.0, (8, 8)),
        (16, 1, 0.5, (8,)),
        (2, 1, 2.0, (4,) * 8),
        (4, 2, 2.0, (4, 4) * 4),
        (4, 3, 2.0, (3, 3, 2) * 4),
        (8, 2, 1.0, (4, 4) * 2),
    ],
)
def test_sub_vectors_and_stages_take_the_bits_of_their_coefficients(
    size: int, depth: int, bits: float, widths: tuple[int, ...]
) -> None:
    """M sub-vectors take M · log2(entries) bits, whatever the depth."""
    x = normal(1, 300, 16)
    quantizer = trained(GroupVQ(size=size, depth=depth, gain="none", n_iterations=1), x, bits)
    assert quantizer.widths == widths
    assert sum(widths) == 16 * bits
    codes = quantizer.encode(x[None])
    assert all(int(codes.symbols[:, i].max()) < 2**width for i, width in enumerate(widths))


def test_a_later_stage_codes_what_the_ones_before_left_over() -> None:
    """Decoding the first stage alone is worse than both, and both stages come close to one codebook of all the bits."""
    x, fresh = normal(1, 4096, 4), normal(1, 2000, 4, seed=1)
    one = mse(trained(GroupVQ(size=4, depth=1, gain="none", n_iterations=10), x, 1.0), fresh)
    two = mse(trained(GroupVQ(size=4, depth=2, gain="none", n_iterations=10), x, 2.0), fresh)
    whole = mse(trained(GroupVQ(size=4, depth=1, gain="none", n_iterations=10), x, 2.0), fresh)
    assert whole < two < 1.5 * whole
    assert two < 0.5 * one


def test_longer_sub_vectors_serve_better_at_one_rate() -> None:
    x, fresh = normal(1, 4096, 8), normal(1, 2000, 8, seed=1)
    errors = [mse(trained(GroupVQ(size=s, gain="none", n_iterations=10), x, 1.0), fresh) for s in (1, 2, 4, 8)]
    assert all(a > b for a, b in pairwise(errors))


SPECTRUM = torch.logspace(1, -2, 16)[None].square()


def volumes(grouping: str, spectrum: Tensor = SPECTRUM) -> Tensor:
    order = group_order(spectrum, 4, grouping)[0]
    assert sorted(order.flatten().tolist()) == list(range(16))
    return spectrum[0][order].log().sum(-1)


def test_groups_of_equal_volume_have_more_equal_volumes_than_stratified_ones() -> None:
    spread = {name: float(v.max() - v.min()) for name in ("stratified", "equal_volume", "neighbouring")
              for v in (volumes(name),)}  # fmt: skip
    assert spread["equal_volume"] < 0.1 * spread["stratified"] < 0.1 * spread["neighbouring"]


def test_the_stratified_permutation_deals_rank_r_to_group_r_mod_n() -> None:
    order = group_order(SPECTRUM, 4, "stratified")[0]
    assert order.tolist() == [[g + 4 * k for k in range(4)] for g in range(4)]


def test_equal_volumes_serve_a_falling_spectrum_best() -> None:
    """At a fixed width per group the error is that of the group's volume: unequal ones waste bits on weak groups."""
    x, fresh = normal(1, 4096, 16) * SPECTRUM[0].sqrt(), normal(1, 2000, 16, seed=1) * SPECTRUM[0].sqrt()
    errors = {
        name: mse(trained(GroupVQ(grouping=name, gain="none", n_iterations=8), x, 2.0), fresh)
        for name in ("stratified", "equal_volume", "neighbouring")
    }
    assert errors["equal_volume"] < errors["stratified"] < errors["neighbouring"]


@pytest.mark.parametrize("depth", [1, 2])
def test_codebooks_are_the_same_at_every_training(depth: int) -> None:
    x = normal(2, 500, 8)
    spec = GroupVQ(depth=depth, entries="float8_e5m2", n_iterations=3)
    a, b = trained(spec, x, 2.0), trained(spec, x, 2.0)
    assert torch.equal(a.entries.view(torch.uint8), b.entries.view(torch.uint8))  # type: ignore[attr-defined]
    assert torch.equal(a.encode(x[None]).symbols, b.encode(x[None]).symbols)
