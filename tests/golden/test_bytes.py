"""Frozen bytes: a change of one bit here is a new format version and a line in the CHANGELOG.

Inputs come from integer arithmetic and codecs are written down, not trained, so nothing hangs on a linear algebra
library: every sum below is exact, or far from a rounding edge.
"""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from karhunen.codec import Packed, SideCodec
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.kernels.byte_tables import Lookups
from karhunen.packing.bit_fields import BitFields, FixedWidth
from karhunen.quantizers.affine import AffineQuantizer
from karhunen.quantizers.base import Codes
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.byte_vq import INDEX_BITS
from karhunen.quantizers.lloyd_max import LloydMaxQuantizer
from karhunen.quantizers.vector import VectorQuantizer
from karhunen.recipes import make, names
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.rotary import Rotary
from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.identity import Identity

H, D, T = 2, 64, 32


def pack_bits(symbols: list[int], *widths: int) -> list[int]:
    layout = BitFields(widths)
    column = torch.tensor(symbols, dtype=torch.int32)[None, :, None]
    assert layout.unpack(layout.pack(column)).flatten().tolist() == symbols
    return layout.pack(column).flatten().tolist()


def test_three_bit_layout_is_frozen() -> None:
    """Symbol i occupies bits 3i … 3i+2, least significant bit first."""
    assert pack_bits([1, 2, 3, 4, 5, 6, 7, 0], *[3] * 8) == [0xD1, 0x58, 0x1F]


LAYOUTS = {
    1: [0b10110101, 0b00000001],
    2: [0b11_10_01_00, 0b00_01_10_11],
    4: [0x21, 0x43, 0x05],
    8: [7, 200, 255],
}


def test_layouts_of_one_width_are_frozen() -> None:
    assert pack_bits([1, 0, 1, 0, 1, 1, 0, 1, 1], *[1] * 9) == LAYOUTS[1]
    assert pack_bits([0, 1, 2, 3, 3, 2, 1, 0], *[2] * 8) == LAYOUTS[2]
    assert pack_bits([1, 2, 3, 4, 5], *[4] * 5) == LAYOUTS[4]
    assert pack_bits([7, 200, 255], *[8] * 3) == LAYOUTS[8]
    assert pack_bits([0b10001, 0b01110, 0b11111], 5, 5, 5) == [0b110_10001, 0b0_11111_01]
    assert pack_bits([0b100001, 0b111111], 6, 6) == [0b11_100001, 0b1111]
    assert pack_bits([0b1000001, 0b0111110], 7, 7) == [0b0_1000001, 0b0_011111]


def test_the_layout_of_mixed_widths_is_frozen() -> None:
    """Widths 1 to 8, each with its highest and lowest bit set: 36 bits in 5 bytes."""
    symbols = [1, 0b11, 0b101, 0b1001, 0b10001, 0b100001, 0b1000001, 0b10000001]
    assert pack_bits(symbols, *range(1, 9)) == [0x6F, 0xC6, 0x30, 0x18, 0x08]


def integers(n: int, salt: int = 0) -> Tensor:
    """−512 … 511 by a multiplicative hash."""
    return torch.tensor([((i + salt + 1) * 2654435761 >> 11) % 1024 - 512 for i in range(n)])


def cached(salt: int) -> Tensor:
    """Multiples of 1/64 whose level falls along the coordinates, [1 h t d]."""
    x = integers(H * T * D, salt).reshape(1, H, T, D).float() / 64
    return x * torch.tensor([1.0, 0.5, 0.25, 0.125]).repeat_interleave(D // 4)


def digest(packed: Packed) -> str:
    hashed = hashlib.sha256()
    for name, tensor in [("planes", packed.planes), *sorted(packed.side.items())]:
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


POSITIONS = torch.arange(T)[None]
MODEL = ModelIdentity("golden", "c", "w", (LayerShape("full", H, H, D, D),))

UNTRAINED = {
    "exllamav3": ("7cd0ce5f27cc6846", "f180059db450d029"),
    "fp8": ("6208963a38ad55ce", "b0fe16100cd9cff9"),
    "int2": ("cb537837dee01021", "543cc6c4c338499f"),
    "int4": ("e1d53f8135ffd634", "e0a8f62890bf57bc"),
    "int4_per_token_head": ("0cf8975a93b4a20d", "b6350290d2aa0945"),
    "int8": ("61a2ad24ede5946f", "b2cedf2e8c5990cd"),
    "kitty": ("2ac116d71a07fee3", "5baa4a875e51a007"),
    "kivi": ("de3c6f8815002cf8", "5baa4a875e51a007"),
    "mlx": ("ea3daf5cb9cf18eb", "fcbea14e38e07c76"),
    "mxfp4": ("4894675a27c16de6", "05ad91574840a95a"),
    "nvfp4": ("ae5abec09a0dd25b", "f887b8aa6b5531fb"),
    "polarquant_pairs": ("d17ed7594d2b6a18", "96bd05b17a427344"),
    "q4_0": ("69a031ca5eff176c", "70aae53f73a11749"),
    "q8_0": ("be327b496f6eb14c", "32fbd1b6b0da7b0b"),
    "quarot": ("0cf8975a93b4a20d", "b6350290d2aa0945"),
    "snapkv_int4": ("e1d53f8135ffd634", "e0a8f62890bf57bc"),
    "streaming_int4": ("e1d53f8135ffd634", "e0a8f62890bf57bc"),
    "turboquant_3bit": ("7b31d04a4d904476", "49526b9b781937a3"),
    "turboquant_4bit": ("30be117fbd7ae575", "e0a8f62890bf57bc"),
    "turboquant_k3v4": ("7b31d04a4d904476", "e0a8f62890bf57bc"),
    "turboquant_k8v4": ("6208963a38ad55ce", "e0a8f62890bf57bc"),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_the_bytes_of_an_untrained_recipe_are_frozen(name: str) -> None:
    codec = fit(make(name), Statistics(MODEL, {0: LayerStatistics()}))
    sides = codec.layers[0].key, codec.layers[0].value
    got = tuple(digest(side.encode(cached(salt), POSITIONS)) for salt, side in enumerate(sides))
    assert got == UNTRAINED[name]


ROTATED = {
    "turboquant",
    "turboquant_prod",
    "polarquant",
    "octopus",
}  # by a matrix from QR, whose last bits the library decides


def test_every_untrained_recipe_is_frozen() -> None:
    untrained = {name for name in names() if (recipe := make(name)).key and not recipe.needs()}
    assert untrained == UNTRAINED.keys() | ROTATED


def side(quantizer: object, frame: RopeFrame, rotary: Rotary | None = None, transform: object = None) -> SideCodec:
    layout = FixedWidth().fit(quantizer.widths)  # type: ignore[attr-defined]
    return SideCodec(H, frame, rotary, None, transform or Identity(), quantizer, layout)  # type: ignore[arg-type]


def latent() -> SideCodec:
    """SPECTRA's layout: heads joined, an affine map (a reversal), widths by groups, the last group dropped."""
    flip = torch.eye(H * D).flip(0)[None].contiguous()
    bits = torch.tensor([5, 3, 2, 0], dtype=torch.int32).repeat_interleave(32)[None]
    turn = Rotary(2.0 ** -torch.arange(D // 2).float())
    reversal = AffineMap(torch.zeros(1, H * D), flip, flip)
    return side(AffineQuantizer(bits, 32, 1, 1.0), RopeFrame(1, joined=True), turn, reversal)


def group_vq(gain: str) -> SideCodec:
    """NOVA-KV's layout: four coefficients, 256 entries, round-robin groups, a gain per token."""
    groups = H * D // 4
    tables = integers(groups * 256 * 4, 7).float() / 256
    order = torch.arange(D).reshape(4, -1).mT.flatten().repeat(H)
    return side(
        VectorQuantizer(
            g=H, c=D, gain=gain, plane_group=torch.arange(H).repeat_interleave(D // 4),  # type: ignore[arg-type]
            plane_stage=torch.zeros(groups, dtype=torch.int64), plane_bits=torch.full((groups,), 8),
            plane_size=torch.full((groups,), 4), coordinates=order, entries=tables.to(torch.float16),
            scale=torch.ones(groups),
        ),
        RopeFrame(),
    )  # fmt: skip


def byte_vq() -> SideCodec:
    """Byte codes: groups of 1, 3 and 12 coefficients, the first refined by a second stage."""
    sizes, stages = [1, 3, 12, 1] * H, [0, 0, 0, 1] * H
    tables = integers(sum(256 * n for n in sizes), 3).float() / 128
    return side(
        VectorQuantizer(
            g=H, c=D, gain="log8", plane_group=torch.arange(H).repeat_interleave(4),
            plane_stage=torch.tensor(stages), plane_bits=torch.full((4 * H,), 8), plane_size=torch.tensor(sizes),
            coordinates=torch.tensor([0, 1, 2, 3, *range(4, 16), 0] * H),
            entries=tables.to(torch.float16), scale=torch.ones(4 * H),
        ),
        RopeFrame(64), Rotary(2.0 ** -torch.arange(D // 2).float()),
    )  # fmt: skip


def lookups(kind: str, gain: str) -> SideCodec:
    """Byte codes as int8 look-ups, planes and coefficients as above."""
    sizes = [1, 3, 12, 1] * H
    n, (a, b) = sum(sizes), INDEX_BITS[kind]
    low, high = (integers(rows * n, salt).reshape(rows, n) % 64 - 32 for rows, salt in ((2**a, 3), (2**b, 4)))
    return side(
        ByteQuantizer(
            g=H, c=D, gain=gain, plane_group=torch.arange(H).repeat_interleave(4),  # type: ignore[arg-type]
            plane_size=torch.tensor(sizes), coordinates=torch.tensor([0, 1, 2, 3, *range(4, 16), 0] * H),
            low=low.to(torch.int8), high=high[: len(high) if b else 0].to(torch.int8), scale=torch.full((n,), 1 / 16),
        ),
        RopeFrame(64), Rotary(2.0 ** -torch.arange(D // 2).float()),
    )  # fmt: skip


def lloyd_max() -> SideCodec:
    """Gaussian levels of widths 1 to 4, none for the last quarter."""
    bits = torch.tensor([4, 3, 1, 0], dtype=torch.int32).repeat_interleave(D // 4).expand(H, D).contiguous()
    return side(LloydMaxQuantizer(bits, torch.ones(H, D), "float16"), RopeFrame())


TRAINED: dict[str, tuple[Callable[[], SideCodec], str]] = {
    "latent": (latent, "e151d54e599cde78"),
    "group_vq_float16": (lambda: group_vq("float16"), "f1113f6721f3db9f"),
    "group_vq_no_gain": (lambda: group_vq("none"), "94384628b1f165ec"),
    "byte_vq": (byte_vq, "344ec3e0bf027b59"),
    "lookups_free": (lambda: lookups("free", "none"), "d235f3356f4a2e7a"),
    "lookups_free_gain": (lambda: lookups("free", "float16"), "af03fc7bed67215b"),
    "lookups_overlapping": (lambda: lookups("overlapping", "none"), "3f7a45a266bf371c"),
    "lookups_additive": (lambda: lookups("additive", "log8"), "85d09edcf369f2a1"),
    "lloyd_max": (lloyd_max, "e36ccf1de33bca34"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_the_bytes_of_a_codec_written_down_are_frozen(name: str) -> None:
    make_side, frozen = TRAINED[name]
    assert digest(make_side().encode(cached(5), POSITIONS)) == frozen


ROWS_OF_C5 = {"free": (0xC5, None), "overlapping": (0x05, 0x31), "additive": (0x05, 0x0C)}
"""The rows that the byte 0xC5 = 0b11000101 names: all bits; the lower and the upper six, then four."""


def counting(kind: str) -> ByteQuantizer:
    """One plane of two columns, in which every byte means its own number less 128, in steps of 1/2 and of 2."""
    a, b = INDEX_BITS[kind]
    low, high = torch.arange(2**a), torch.arange(2**b if b else 0)
    first = low - 128 if not b else low  # the low rows count the lowest bits, the high rows those above
    columns = {
        "free": ((first, high), (first, high)),
        "overlapping": ((first, high // 16 * 64 - 128), (first % 4, 4 * high - 128)),
        "additive": ((first, 16 * high - 128), (first - 8, 16 * high - 120)),
    }[kind]
    lows, highs = (torch.stack([column[i] for column in columns], 1) for i in range(2))
    return ByteQuantizer(
        g=1, c=2, gain="none", plane_group=torch.tensor([0]), plane_size=torch.tensor([2]),
        coordinates=torch.tensor([1, 0]), low=lows.to(torch.int8), high=highs.to(torch.int8),
        scale=torch.tensor([0.5, 2.0]),
    )  # fmt: skip


@pytest.mark.parametrize("kind", INDEX_BITS)
def test_every_byte_of_a_look_up_is_frozen(kind: str) -> None:
    quantizer = counting(kind)
    every = torch.arange(256, dtype=torch.int32)[None, None]
    y = quantizer.decode(Codes(every, {}))
    assert y.flatten(0, 2).tolist() == [[2.0 * (byte - 128), 0.5 * (byte - 128)] for byte in range(256)]
    assert torch.equal(quantizer.encode(y).symbols, every)


@pytest.mark.parametrize("kind", INDEX_BITS)
def test_the_rows_that_a_byte_names_are_frozen(kind: str) -> None:
    low, high = (torch.zeros(2**bits if bits else 0, 1, dtype=torch.int8) for bits in INDEX_BITS[kind])
    for rows, row, value in zip((low, high), ROWS_OF_C5[kind], (3, 5), strict=True):
        if row is not None:
            rows[row] = value
    assert Lookups(low, high, torch.ones(1)).entries()[0xC5].item() == 3 + (5 if len(high) else 0)
