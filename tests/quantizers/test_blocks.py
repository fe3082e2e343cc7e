"""Formats of engines against their definitions, one number at a time."""

import math

import pytest
import torch
from tests.closeness import assert_near
from tests.quantizers.test_quantizers import normal, rates, through
from torch import Tensor

from karhunen.quantizers.affine import PerChannel, PerToken
from karhunen.quantizers.anchored import Anchored
from karhunen.quantizers.blocks import MAGNITUDES, Blocks
from karhunen.quantizers.midpoints import Midpoints
from karhunen.quantizers.sign_magnitude import SignMagnitude
from karhunen.transforms.base import TransformData
from karhunen.transforms.block_hadamard import BlockHadamard

E2M1 = [sign * m for m in MAGNITUDES for sign in (1.0, -1.0)]


def block(*values: float, n: int = 32) -> Tensor:
    """A vector of one head and token, padded with zeros."""
    return torch.tensor([*values, *[0.0] * (n - len(values))])[None, None, None]


def half(x: float) -> float:
    return float(torch.tensor(x).half())


def test_every_four_bit_float_comes_back_as_it_is() -> None:
    y = block(*E2M1)
    for spec in (Blocks("float4", "e8m0", 32), Blocks("float4", "e4m3", 16)):
        assert torch.equal(through(spec.fit(rates(4, 1, 32)), y).abs(), y.abs())
        assert torch.equal(through(spec.fit(rates(4, 1, 32)), y), y)


def test_halves_go_to_the_even_code_and_what_is_too_large_to_six() -> None:
    given = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.75, -5.0]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -1.0, -4.0]
    made = through(Blocks("float4", "e8m0", 32).fit(rates(4, 1, 32)), block(*given))
    assert made.flatten()[: len(wanted)].tolist() == wanted


@pytest.mark.parametrize("largest", [1e-6, 0.1, 0.5, 3.0, 4.0, 7.99, 1000.0])
def test_a_shared_power_of_two_is_the_largest_value_s_over_four(largest: float) -> None:
    codes = Blocks("float4", "e8m0", 32).fit(rates(4, 1, 32)).encode(block(largest, -largest / 3))
    assert codes.side["scale"].item() == math.floor(math.log2(largest)) - 2 + 127
    assert codes.side["scale"].dtype == torch.uint8


def test_a_float8_scale_is_a_sixth_of_the_largest_value_over_the_unit() -> None:
    for unit in (1.0, 0.125):
        codes = Blocks("float4", "e4m3", 16, unit).fit(rates(4, 1, 16)).encode(block(3.3, -1, n=16))
        stored = codes.side["scale"].view(torch.float8_e4m3fn).float().item()
        assert stored == torch.tensor(3.3 / 6 / unit).to(torch.float8_e4m3fn).float().item()


def test_eight_and_four_bit_blocks_are_ggml_s() -> None:
    y = normal(1, 1, 40, 64)
    made8 = through(Blocks("int8").fit(rates(8, 1, 64)), y)
    made4 = through(Blocks("int4").fit(rates(4, 1, 64)), y)
    for t in range(40):
        for start in (0, 32):
            x = y[0, 0, t, start : start + 32].tolist()
            largest = max(x, key=abs)
            d8, d4 = half(abs(largest) / 127), half(largest / -8)
            wanted8 = [d8 * round(v / d8) for v in x]
            wanted4 = [d4 * (min(15, int(v / d4 + 8.5)) - 8) for v in x]
            assert made8[0, 0, t, start : start + 32].tolist() == pytest.approx(wanted8, rel=1e-6, abs=1e-7)
            assert made4[0, 0, t, start : start + 32].tolist() == pytest.approx(wanted4, rel=1e-6, abs=1e-7)


def test_an_anchored_range_has_zero_and_its_far_end_among_its_points() -> None:
    for y in (block(-1.0, 0.5, 0.3), block(1.0, -0.5, 0.3), block(*[2.0 + i / 40 for i in range(32)])):
        made = through(Anchored(32).fit(rates(4, 1, 32)), y).flatten()
        far = int(y.abs().argmax())
        assert made[far].item() == pytest.approx(y.flatten()[far].item(), rel=1e-3)
        zeros = made[y.flatten() == 0]
        assert not len(zeros) or float(zeros.abs().max()) <= 1e-3


def test_anchored_steps_are_mlx_s() -> None:
    """scale and bias as mx.quantize has them, from its documented rule, in Python's floats."""
    y = normal(1, 1, 20, 64)
    codes = Anchored(64).fit(rates(4, 1, 64)).encode(y)
    for t in range(20):
        x = y[0, 0, t].tolist()
        low, high = min(x), max(x)
        step = max((high - low) / 15, 1e-7) * (1 if abs(low) > abs(high) else -1)
        edge = low if abs(low) > abs(high) else high
        n = round(edge / step)
        step, bias = (edge / n, edge) if n else (step, 0.0)
        assert codes.side["step"][0, 0, t].item() == half(step)
        assert codes.side["edge"][0, 0, t].item() == half(bias)
        symbols = [min(15, max(0, round((v - half(bias)) / half(step)))) for v in x]
        assert codes.symbols[0, :, t].tolist() == symbols


def test_zeros_stay_zeros_and_no_value_becomes_infinite() -> None:
    specs = [(Blocks("int8"), 8), (Blocks("int4"), 4), (Blocks("float4", "e4m3", 16), 4), (Anchored(), 4)]
    for spec, bits in [*specs, (Blocks("float4", "e8m0"), 4)]:
        made = spec.fit(rates(bits, 1, 64))
        assert not through(made, torch.zeros(1, 1, 3, 64)).any()
        assert through(made, torch.full((1, 1, 3, 64), 3e38)).isfinite().all()


def test_formats_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="use scale='float16'"):
        Blocks("int4", "e8m0")
    with pytest.raises(ValueError, match=r"unit=2\.0 with float16"):
        Blocks("int8", unit=2.0)
    with pytest.raises(ValueError, match=r"use Uniform\(8\)"):
        Blocks("int8").fit(rates(4, 1, 64))
    with pytest.raises(ValueError, match="group=1 or more"):
        Anchored(0)
    with pytest.raises(ValueError, match="one of Uniform"):
        Anchored().fit(rates(2.5, 1, 64))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_midpoints_are_exllamav3_s(bits: int) -> None:
    """⌊(x / scale + 1) · 2^(w−1)⌋ and its cell's middle, number by number."""
    y = normal(1, 1, 20, 64)
    made = through(Midpoints(32).fit(rates(bits, 1, 64)), y)
    for t in range(20):
        for start in (0, 32):
            x = y[0, 0, t, start : start + 32].tolist()
            scale = half(max(map(abs, x)))
            symbols = [min(max(math.floor((v / scale + 1) * 2 ** (bits - 1)), 0), 2**bits - 1) for v in x]
            wanted = [scale * ((2 * s + 1) / 2**bits - 1) for s in symbols]
            assert made[0, 0, t, start : start + 32].tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_block_s_rotation_mixes_no_other_block() -> None:
    turn = BlockHadamard().fit(TransformData(1, 64))
    one = turn.forward(torch.eye(64)[None, None, :1])[0, 0, 0].float()
    assert_near(one[:32].abs(), torch.full((32,), 32**-0.5), 1e-6)
    assert not one[32:].any()
    assert BlockHadamard().fit(TransformData(1, 80)).forward(torch.eye(80)[None, None])[0, 0, 0].count_nonzero() == 20


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("where", [PerToken(32), PerChannel(32)])
@pytest.mark.parametrize("bits", [2, 3])
def test_a_sign_and_a_magnitude_or_a_range_where_that_is_closer(
    where: PerToken | PerChannel, bits: int, hybrid: bool
) -> None:
    y = normal(1, 1, 64, 64) + torch.linspace(-3, 3, 64)[:, None] * (1 if isinstance(where, PerToken) else 0)
    y = y if isinstance(where, PerToken) else y + torch.linspace(-3, 3, 64)
    quantizer = SignMagnitude(where, hybrid).fit(rates(bits, 1, 64))
    codes, made = quantizer.encode(y), through(quantizer, y)
    top = 2 ** (bits - 1) - 1
    ranges = 0
    groups, back = (x[0, 0] if isinstance(where, PerToken) else x[0, 0].T for x in (y, made))
    for row, got in zip(
        groups.unflatten(-1, (2, 32)).flatten(0, 1), back.unflatten(-1, (2, 32)).flatten(0, 1), strict=True
    ):
        x = row.tolist()
        scale, low, step = half(max(map(abs, x)) / top), half(min(x)), half((max(x) - min(x)) / top)
        symmetric = [scale * round(v / scale) for v in x]
        ranged = [low + step * min(max(round((v - low) / step), 0), top) for v in x]
        errors = [sum(abs(a - b) for a, b in zip(x, found, strict=True)) for found in (symmetric, ranged)]
        ranges += hybrid and errors[1] < errors[0]
        wanted = ranged if hybrid and errors[1] < errors[0] else symmetric
        assert got.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    assert int(torch.signbit(codes.side["scale"]).sum()) == ranges
    assert (ranges > 0) == hybrid
