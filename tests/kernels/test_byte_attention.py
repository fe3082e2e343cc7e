"""Attention from bytes: the kernel is its definition, and parts of a softmax merge into the whole."""

from dataclasses import replace

import pytest
import torch
from tests.closeness import assert_near
from torch import Tensor

from karhunen.kernels.byte_attention import CodedTokens, available, byte_attention, choose_path, naive
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.softmax import Partial, merge_partials

LENGTHS = (1, 63, 64, 1000)  # below, around and past one block of tokens


def example(
    t: int,
    *,
    b: int = 1,
    h: int = 2,
    q: int = 3,
    d: int = 64,
    block_tokens: int | None = None,
    first_offset: int = 0,
    residual: bool = False,
    gain: str | None = "half",
    seed: int = 0,
) -> tuple[Tensor, CodedTokens, CodedTokens]:
    """Frames, keys and values with ragged planes, cut from the middle of larger, poisoned buffers."""
    generator = torch.Generator().manual_seed(seed)
    n = 1 if block_tokens is None else (t - 1 + first_offset) // block_tokens + 1
    frames = torch.randn(b, h, q, n, d, generator=generator)
    return frames, side(t, b, h, d, residual, gain, generator), side(t, b, h, d, False, gain, generator)


def side(t: int, b: int, h: int, d: int, residual: bool, gain: str | None, generator: torch.Generator) -> CodedTokens:
    tables = ragged_tables(h, d, residual, generator)
    codes = torch.full((b + 1, tables.n_planes + 2, t + 37), 255, dtype=torch.uint8)[1:, 1:-1, 5 : 5 + t]
    codes.copy_(torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8))
    if gain is None:
        return CodedTokens(codes, tables)
    levels = torch.linspace(-2, 1, 256).exp()
    index = torch.randint(0, 256, (b, h, t), generator=generator, dtype=torch.uint8)
    if gain == "levels":
        return CodedTokens(codes, tables, index, levels)
    dtype = {"half": torch.float16, "float": torch.float32}[gain]
    buffer = torch.full((b, h, t + 50), torch.nan, dtype=dtype)[..., 13 : 13 + t]
    return CodedTokens(codes, tables, buffer.copy_(levels[index.long()]))


def ragged_tables(h: int, d: int, residual: bool, generator: torch.Generator) -> ByteTables:
    """Planes 1 to 24 wide, a different number for each head; a residual stage codes the first coefficients again."""
    heads = []
    for head in range(h):
        order = torch.randperm(d, generator=generator)
        planes = []
        while len(order):
            width = int(torch.randint(1, 9 if head % 2 else 25, (), generator=generator))
            planes.append(plane(order[:width], generator))
            order = order[width:]
        if residual:
            planes += [plane(torch.arange(head, head + 5), generator), plane(torch.arange(7), generator)]
        heads.append(planes)
    return ByteTables.from_planes(heads, d)


def plane(coefficient: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(256, len(coefficient), generator=generator).half() / 4, coefficient


def assert_equals_naive(frames: Tensor, keys: CodedTokens, values: CodedTokens, **options) -> None:
    cpu = pytest.importorskip("karhunen.kernels.byte_attention.cpu")
    runs, reason = available("cpu")
    if not runs:
        pytest.skip(reason)
    expected = naive.byte_attention(frames.double(), keys, values, **options)
    actual = cpu.byte_attention(frames, keys, values, **options)
    assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
    assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)


@pytest.mark.parametrize("q", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("t", LENGTHS)
def test_kernel_equals_naive(t: int, q: int, nan_filled_memory: None) -> None:
    assert_equals_naive(*example(t, q=q, b=2), scale=0.125)


@pytest.mark.parametrize("d", [64, 80, 96, 128])
def test_any_head_size_is_read(d: int) -> None:
    assert_equals_naive(*example(200, d=d), scale=d**-0.5)


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize(("block_tokens", "first_offset"), [(1, 0), (3, 1), (64, 0), (64, 41), (256, 255)])
@pytest.mark.parametrize("t", LENGTHS)
def test_each_token_is_read_in_the_frame_of_its_block(t: int, block_tokens: int, first_offset: int, q: int) -> None:
    blocks = {"block_tokens": block_tokens, "first_offset": first_offset}
    frames, keys, values = example(t, q=q, **blocks)
    bias = torch.randn(frames.shape[:-1], generator=torch.Generator().manual_seed(1))
    assert_equals_naive(frames, keys, values, key_bias=bias, scale=0.125, **blocks)


@pytest.mark.parametrize("q", [1, 3, 11])
@pytest.mark.parametrize(("t", "first_offset"), [(1, 63), (63, 1), (64, 0), (1000, 40)])
def test_each_token_of_a_block_may_have_a_bias_of_its_own(t: int, first_offset: int, q: int) -> None:
    blocks = {"block_tokens": 64, "first_offset": first_offset}
    frames, keys, values = example(t, q=q, b=2, **blocks)
    bias = torch.randn(*frames.shape[:-1], 64, generator=torch.Generator().manual_seed(1))
    assert_equals_naive(frames, keys, values, offset_bias=bias, scale=0.125, softcap=3.0, **blocks)


def test_entries_finer_than_float16_keep_their_value() -> None:
    frames, keys, values = example(200)
    finer = [
        replace(side, tables=replace(side.tables, entries=side.tables.entries.float() * 1.001))
        for side in (keys, values)
    ]
    assert_equals_naive(frames, *finer, scale=0.125)


@pytest.mark.parametrize("gain", [None, "float", "levels"])
def test_a_gain_may_be_absent_or_float_or_a_byte(gain: str | None) -> None:
    assert_equals_naive(*example(1000, gain=gain), scale=0.125)


def test_planes_that_name_one_coefficient_add() -> None:
    assert_equals_naive(*example(333, residual=True), scale=0.125)


@pytest.mark.parametrize("boolean", [True, False])
def test_hidden_tokens_and_capped_scores(boolean: bool) -> None:
    frames, keys, values = example(1000, b=2, q=5)
    mask = torch.rand(2, 1000, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[0, :700] = False
    if not boolean:
        mask = torch.zeros(2, 1000).masked_fill(~mask, torch.finfo(torch.float32).min)
        mask[1, ::7] += 0.5
    first_visible = torch.tensor([[0, 5, 990, 0, 1000], [0, 0, 513, 2000, 64]])
    assert_equals_naive(frames, keys, values, mask=mask, first_visible=first_visible, softcap=3.0, scale=0.5)


def test_a_row_that_sees_nothing_has_mean_zero_and_no_weight() -> None:
    frames, keys, values = example(100)
    for path in ("naive", choose_path("cpu").path):
        part = byte_attention(frames, keys, values, path=path, mask=torch.zeros(1, 100, dtype=torch.bool))
        assert part.mean.eq(0).all()
        assert part.log_sum.eq(-torch.inf).all()


def test_a_rising_maximum_moves_the_softmax_reference() -> None:
    frames, keys, values = example(3000, gain="float")
    keys.gain.copy_(torch.linspace(0, 60, 3000))
    assert_equals_naive(frames, keys, values, scale=1.0)


@pytest.mark.parametrize("n_threads", [2, 3])
def test_threads_do_not_change_the_result(n_threads: int) -> None:
    assert_equals_naive_with_threads(n_threads)


def assert_equals_naive_with_threads(n_threads: int) -> None:
    cpu = pytest.importorskip("karhunen.kernels.byte_attention.cpu")
    frames, keys, values = example(9001, h=1, b=1, block_tokens=256)
    options = {"block_tokens": 256, "scale": 0.125}
    expected = naive.byte_attention(frames.double(), keys, values, **options)
    actual = cpu.byte_attention(frames, keys, values, n_threads=n_threads, **options)
    assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
    assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)


def test_partials_of_disjoint_tokens_merge_into_the_whole() -> None:
    frames, keys, values = example(100)
    frames = frames.double()
    whole = naive.byte_attention(frames, keys, values)
    parts = [
        naive.byte_attention(frames, between(keys, start, stop), between(values, start, stop))
        for start, stop in ((0, 17), (17, 64), (64, 100))
    ]
    nothing = Partial(torch.zeros_like(whole.mean), torch.full_like(whole.log_sum, -torch.inf))
    merged = merge_partials([*parts, nothing])
    torch.testing.assert_close(merged.mean, whole.mean)
    torch.testing.assert_close(merged.log_sum, whole.log_sum)
    assert merge_partials([nothing, nothing]).mean.eq(0).all()


def between(side: CodedTokens, start: int, stop: int) -> CodedTokens:
    return CodedTokens(side.codes[..., start:stop], side.tables, side.gain[..., start:stop])


def test_no_tokens_is_a_partial_without_weight() -> None:
    frames, keys, values = example(64)
    for path in ("naive", choose_path("cpu").path):
        part = byte_attention(frames, between(keys, 0, 0), between(values, 0, 0), path=path)
        assert part.mean.eq(0).all()
        assert part.log_sum.eq(-torch.inf).all()


def test_too_few_frames_are_refused() -> None:
    frames, keys, values = example(64)
    with pytest.raises(ValueError, match="64 tokens from offset 1 lie in 2 blocks of 64; 1 frames were given"):
        byte_attention(frames, keys, values, path="naive", block_tokens=64, first_offset=1)


def test_an_unknown_path_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"naive.*cpu"):
        available("cuda")
