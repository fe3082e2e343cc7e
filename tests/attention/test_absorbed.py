"""Attention in the coefficients equals decoding, then softmax: for any frame, transform and quantizer."""

from dataclasses import replace

import pytest
import torch
from tests.closeness import SUM, assert_near
from tests.synthetic import SMALL, WINDOW, cached, quick, rotary, seeded, statistics
from torch import Tensor

from karhunen.attention import absorbed, reference
from karhunen.attention.absorbed import Absorbed
from karhunen.codec import LayerCodec, Packed
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.kernels.softmax import Partial
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.need import SLOTS
from karhunen.transforms.klt import KLT

KLT_SIDE = Side(transform=KLT())
BLOCK = 16


def in_frame(frame: RopeFrame, value_joined: bool = False) -> Recipe:
    value = replace(KLT_SIDE, frame=RopeFrame(joined=value_joined))
    return Recipe("framed", replace(KLT_SIDE, frame=frame), value, WINDOW)


RECIPES = {
    "post_rope": in_frame(RopeFrame()),
    "block": in_frame(RopeFrame(BLOCK)),
    "block_joined": in_frame(RopeFrame(BLOCK, joined=True), value_joined=True),
    "block_centered": in_frame(RopeFrame(BLOCK, center=True)),
    "block_joined_centered": in_frame(RopeFrame(BLOCK, joined=True, center=True)),
    "pre_rope_joined": in_frame(RopeFrame(1, joined=True), value_joined=True),
    "values_centered": Recipe("framed", KLT_SIDE, replace(KLT_SIDE, frame=RopeFrame(center=True)), WINDOW),
    "spectra": quick(make("spectra:bits=2")),
    "nova_kv": quick(make("nova_kv")),
    "kivi": quick(make("kivi")),
}


def coded(recipe: Recipe, t: int, b: int = 1, first: int = 0) -> tuple[LayerCodec, list[Packed], Tensor]:
    codec = fit(recipe, statistics(recipe, SMALL)).layers[0]
    positions = torch.arange(first, first + t)[None] + torch.arange(b)[:, None] * 3
    x = cached(SMALL, b, t)
    return codec, [codec.side(slot).encode(v, positions) for slot, v in zip(SLOTS, x, strict=True)], positions


def queries(b: int, m: int) -> Tensor:
    return torch.randn(b, SMALL.n_query_heads, m, SMALL.key_dim, generator=seeded(9)).double()


def both(recipe: Recipe, t: int, b: int = 1, m: int = 2, first: int = 0) -> tuple[Partial, Partial]:
    codec, (key, value), positions = coded(recipe, t, b, first)
    layer = Absorbed.of(codec, SMALL.key_dim, SMALL.value_dim, torch.float64)
    rest = (key, value, positions, queries(b, m), SMALL.key_dim**-0.5)
    return absorbed.attend(layer, *rest), reference.attend(codec, *rest)


@pytest.mark.parametrize("name", RECIPES)
def test_reading_coefficients_equals_decoding_then_softmax(name: str) -> None:
    ours, defined = both(RECIPES[name], t=64)
    assert_near(ours.mean, defined.mean, SUM)
    assert_near(ours.log_sum, defined.log_sum, SUM)


@pytest.mark.parametrize(("t", "first"), [(1, 0), (BLOCK, 0), (BLOCK + 1, 0), (50, 5), (33, 1000)])
def test_blocks_may_begin_and_end_anywhere(t: int, first: int) -> None:
    ours, defined = both(RECIPES["block_joined"], t, first=first)
    assert_near(ours.mean, defined.mean, SUM)


def test_rows_of_a_batch_have_positions_of_their_own() -> None:
    ours, defined = both(RECIPES["block"], 40, b=3)
    assert_near(ours.mean, defined.mean, SUM)
    assert_near(ours.log_sum, defined.log_sum, SUM)


def test_the_output_projection_absorbs_the_values_transform() -> None:
    """(Σ a z) (S⁻¹ W_O) summed over heads, plus the offsets' share, is W_O of attention's output."""
    codec, (key, value), positions = coded(RECIPES["block_joined"], 40)
    layer = Absorbed.of(codec, SMALL.key_dim, SMALL.value_dim, torch.float64)
    rest = (key, value, positions, queries(1, 2), 0.2)
    weight = torch.randn(48, SMALL.n_query_heads * SMALL.value_dim, generator=seeded(4)).double()
    plain = reference.attend(codec, *rest).mean.transpose(1, 2).flatten(2) @ weight.mT
    sums = absorbed.attend_coefficients(layer, *rest).mean  # [b q m r]
    offset = layer.value.offset.repeat_interleave(2, 0).flatten() @ weight.mT
    direct = torch.einsum("bqmr,qrn->bmn", sums, layer.output_weight(weight)) + offset
    assert_near(direct, plain, SUM)


def test_coefficients_without_bits_are_not_read() -> None:
    codec, _, _ = coded(quick(make("spectra:bits=1")), 8)
    layer = Absorbed.of(codec, SMALL.key_dim, SMALL.value_dim)
    assert layer.key.n_kept < 2 * SMALL.key_dim
    assert layer.key.matrix.shape == (2, layer.key.n_kept, SMALL.key_dim)


def test_values_of_a_centered_frame_that_turns_are_refused() -> None:
    codec, _, _ = coded(RECIPES["values_centered"], 8)
    turning = replace(codec, value=replace(codec.value, rotary=rotary(SMALL.value_dim)))
    with pytest.raises(ValueError, match="cannot be summed in their coefficients; decode them"):
        Absorbed.of(turning, SMALL.key_dim, SMALL.value_dim)
