"""The Triton kernels are their definitions: on a GPU if there is one, else under Triton's interpreter (conftest.py)."""

import importlib

import pytest
import torch
from tests.closeness import assert_near
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.errors import InterpreterError

from karhunen.kernels import paths, triton_launch
from karhunen.kernels.byte_attention import CodedTokens, byte_attention, choose_path, gpu, naive
from karhunen.kernels.byte_decode import byte_decode
from karhunen.kernels.byte_encode import byte_encode
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.entry_quads import entry_quads, pieces, refines
from karhunen.kernels.softmax import Partial
from karhunen.kernels.split_attention.launch import Launch

DEVICE = torch.device("cpu" if triton_launch.INTERPRETED else "cuda")
LENGTHS = (1, 63, 64, 1000)  # below, around and past one block of tokens


@pytest.fixture(scope="module", autouse=True)
def an_interpreter_that_runs() -> None:
    """Interpreters of some Triton versions cannot read a loop's bounds with the newest NumPy."""
    try:
        byte_encode(torch.zeros(1, 1, 1, 8, device=DEVICE), tables(1, 8, [8]), path="gpu")
    except InterpreterError as error:
        if "only 0-dimensional arrays" not in str(error):
            raise
        pytest.skip(f"this Triton's interpreter does not run with this NumPy: {error}")


def tables(h: int, d: int, widths: list[int], seed: int = 0) -> ByteTables:
    """Planes of the given widths over each head's shuffled coefficients; a sum above d makes residual stages."""
    generator = torch.Generator().manual_seed(seed)
    heads = []
    for head in range(h):
        order = torch.randperm(d, generator=generator).repeat(2)[: sum(widths)]
        parts = order.split(widths if head % 2 == 0 else widths[::-1])
        heads.append([(torch.randn(256, len(part), generator=generator).half() / 4, part) for part in parts])
    return ByteTables.from_planes(heads, d)


def side(t: int, b: int, given: ByteTables, gain: str | None, seed: int = 0) -> CodedTokens:
    """Bytes and gains cut from the middle of larger buffers, which are poisoned beyond them."""
    generator = torch.Generator().manual_seed(seed)
    shape, room = (b, given.n_planes, t), (b + 1, given.n_planes + 2, t + 37)
    codes = torch.full(room, 255, dtype=torch.uint8, device=DEVICE)[1:, 1:-1, 5 : 5 + t]
    codes.copy_(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))
    if gain is None:
        return CodedTokens(codes, given)
    levels = torch.linspace(-2, 1, 256).exp()
    index = torch.randint(0, 256, (b, given.n_heads, t), generator=generator, dtype=torch.uint8)
    if gain == "levels":
        return CodedTokens(codes, given, index.to(DEVICE), levels)
    dtype = {"half": torch.float16, "float": torch.float32}[gain]
    buffer = torch.full((b, given.n_heads, t + 50), torch.nan, dtype=dtype, device=DEVICE)[..., 13 : 13 + t]
    return CodedTokens(codes, given, buffer.copy_(levels[index.long()]))


def frames_of(t: int, b: int, h: int, q: int, d: int, block_tokens: int | None = None, offset: int = 0) -> Tensor:
    n = 1 if block_tokens is None else (t - 1 + offset) // block_tokens + 1
    return torch.randn(b, h, q, n, d, generator=torch.Generator().manual_seed(7))


def at_home(part: CodedTokens) -> CodedTokens:
    return CodedTokens(part.codes.cpu(), part.tables, None if part.gain is None else part.gain.cpu(), part.gain_levels)


def assert_equals_naive(
    frames: Tensor,
    keys: CodedTokens,
    values: CodedTokens,
    *,
    launch: Launch | None = None,
    n_splits: int | None = None,
    **options,
) -> Partial:
    expected = naive.byte_attention(frames.double(), at_home(keys), at_home(values), **options)
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    actual = gpu.byte_attention(frames.to(DEVICE), keys, values, launch=launch, n_splits=n_splits, **moved)
    assert_near(actual.mean.cpu(), expected.mean, gpu.TOLERANCE)
    assert_near(actual.log_sum.cpu(), expected.log_sum, gpu.TOLERANCE)
    return actual


RAGGED = [1, 2, 3, 4, 5, 8, 17, 24]  # of 64


@pytest.mark.parametrize("t", LENGTHS)
def test_attention_equals_naive(t: int, nan_filled_memory: None) -> None:
    keys, values = side(t, 2, tables(1, 64, RAGGED), "half"), side(t, 2, tables(1, 64, RAGGED, 1), "half", 1)
    assert_equals_naive(frames_of(t, 2, 1, 4, 64), keys, values, scale=0.125, launch=Launch(128, 4))


@pytest.mark.parametrize(("q", "h"), [(1, 2), (3, 1), (8, 1), (20, 1)])
def test_any_number_of_query_rows_is_read(q: int, h: int) -> None:
    keys, values = side(65, 1, tables(h, 64, RAGGED), None), side(65, 1, tables(h, 64, RAGGED, 1), "float", 1)
    assert_equals_naive(frames_of(65, 1, h, q, 64), keys, values, scale=0.125)


@pytest.mark.parametrize(
    ("d", "widths"),
    [(80, [5] * 16), (128, [1, 3, 4, 8] * 8), (128, [1, 2] * 42 + [2]), (256, [8, 24] * 8)],
    ids=["80", "128 in 40 quads", "128 in 85 quads", "256"],
)
def test_any_head_size_and_layout_is_read(d: int, widths: list[int]) -> None:
    keys, values = side(40, 1, tables(1, d, widths), "half"), side(40, 1, tables(1, d, widths, 1), "half", 1)
    assert_equals_naive(frames_of(40, 1, 1, 4, d), keys, values, scale=d**-0.5)


@pytest.mark.parametrize(
    ("t", "block_tokens", "offset", "n_splits"),
    [(9, 1, 0, 1), (40, 3, 1, 2), (150, 64, 41, 3), (90, 64, 130, 1), (270, 256, 255, 2)],
)
def test_each_token_is_read_in_the_frame_of_its_block(t: int, block_tokens: int, offset: int, n_splits: int) -> None:
    given = tables(1, 32, [3, 5, 8, 16])
    keys, values = side(t, 1, given, "half"), side(t, 1, given, "half", 1)
    frames = frames_of(t, 1, 1, 3, 32, block_tokens, offset)
    bias = torch.randn(frames.shape[:-1], generator=torch.Generator().manual_seed(1))
    offset_bias = torch.randn(*frames.shape[:-1], block_tokens, generator=torch.Generator().manual_seed(2))
    assert_equals_naive(
        frames, keys, values, key_bias=bias, offset_bias=offset_bias, scale=0.3,
        block_tokens=block_tokens, first_offset=offset, n_splits=n_splits,
    )  # fmt: skip


@pytest.mark.parametrize("n_splits", [1, 2, 9])
def test_splits_do_not_change_the_result(n_splits: int) -> None:
    given = tables(1, 32, [3, 5, 8, 16])
    keys, values = side(130, 1, given, "levels"), side(130, 1, given, "levels", 1)
    assert_equals_naive(frames_of(130, 1, 1, 3, 32), keys, values, n_splits=n_splits, launch=Launch(16, 4))


@pytest.mark.parametrize("boolean", [True, False])
def test_hidden_tokens_and_capped_scores(boolean: bool) -> None:
    t, given = 300, tables(1, 32, [3, 5, 8, 16])
    mask = torch.rand(2, t, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[0, :200] = False
    if not boolean:
        mask = torch.zeros(2, t).masked_fill(~mask, torch.finfo(torch.float32).min)
        mask[1, ::7] += 0.5
    first_visible = torch.tensor([[150, 255, 290, 120, 300], [130, 131, 213, 2000, 164]])
    options = {"mask": mask, "first_visible": first_visible, "softcap": 3.0, "scale": 0.5}
    keys, values = side(t, 2, given, "half"), side(t, 2, given, None, 1)
    seen = assert_equals_naive(frames_of(t, 2, 1, 5, 32), keys, values, n_splits=2, **options)
    assert seen.log_sum[0, 0, 4].item() == -torch.inf
    assert seen.mean[0, 0, 4].eq(0).all()


def test_planes_that_name_one_coefficient_add() -> None:
    given = tables(2, 32, [3, 5, 8, 16, 7, 2])
    assert refines(given)
    keys, values = side(70, 1, given, "half"), side(70, 1, given, "half", 1)
    assert_equals_naive(frames_of(70, 1, 2, 2, 32), keys, values, scale=0.2)


@pytest.mark.parametrize("magnitude", [1e-6, 1e6])
def test_operands_beyond_the_range_of_float16_are_scaled_into_it(magnitude: float) -> None:
    small = tables(1, 32, [3, 5, 8, 16])
    given = ByteTables(small.entries.float() * magnitude, small.coefficient, small.column_start, small.plane_start, 32)
    keys, values = side(70, 1, given, "float"), side(70, 1, small, "float", 1)
    values.gain.mul_(1e5)
    frames = frames_of(70, 1, 1, 3, 32) / magnitude
    expected = naive.byte_attention(frames.double(), at_home(keys), at_home(values), scale=0.2)
    actual = gpu.byte_attention(frames.to(DEVICE), keys, values, scale=0.2)
    assert_near(actual.mean.cpu(), expected.mean, gpu.TOLERANCE)
    assert_near(actual.log_sum.cpu(), expected.log_sum, gpu.TOLERANCE)


def test_no_tokens_is_a_partial_without_weight() -> None:
    given = tables(1, 32, [8, 24])
    nothing = side(0, 1, given, None)
    part = byte_attention(torch.zeros(1, 1, 2, 1, 32, device=DEVICE), nothing, nothing, path="gpu")
    assert part.mean.eq(0).all()
    assert part.log_sum.eq(-torch.inf).all()


def test_quads_hold_every_entry_and_fit_pieces() -> None:
    given = tables(2, 64, RAGGED)
    quads = entry_quads(given, torch.device("cpu"))
    entries = quads.low[..., None].view(torch.float16).float() * quads.scale.view(2, -1, 1, 4)
    for head in range(2):
        rebuilt, wanted = torch.zeros(256, 64), torch.zeros(256, 64)
        for quad in range(quads.plane.shape[1]):
            rebuilt.index_add_(1, quads.coefficient.view(2, -1, 4)[head, quad], entries[head, quad])
        for j in range(given.plane_start[head], given.plane_start[head + 1]):
            table, index = given.plane(j)
            wanted[:, index] = table.float()
        assert torch.equal(rebuilt, wanted)
    assert [pieces(n) for n in (0, 1, 16, 17, 44, 50, 80)] == [
        (16, 0), (16, 0), (16, 0), (32, 0), (32, 16), (64, 0), (64, 16),
    ]  # fmt: skip


@pytest.mark.parametrize("widths", [[1, 2, 5, 8, 17], [11] * 3, [9] * 5], ids=["ragged", "even", "residual"])
def test_coding_gives_the_bytes_and_numbers_of_naive(widths: list[int], nan_filled_memory: None) -> None:
    given = tables(2, 33, widths)
    x = torch.randn(2, 2, 35, 33, generator=torch.Generator().manual_seed(0))
    codes = byte_encode(x.to(DEVICE), given, path="gpu")
    assert torch.equal(codes.cpu(), byte_encode(x, given, path="naive"))
    assert torch.equal(byte_decode(codes, given, path="gpu").cpu(), byte_decode(codes.cpu(), given, path="naive"))


def test_encoding_leaves_its_input_and_chooses_the_lowest_of_equal_entries() -> None:
    entries = torch.zeros(256, 2).half()
    entries[7:, 0] = 1.0
    plane = (entries, torch.tensor([0, 1]))
    x = torch.tensor([[[[0.0, 3.0], [1.0, -2.0]]]], device=DEVICE)
    kept = x.clone()
    codes = byte_encode(x, ByteTables.from_planes([[plane, plane]], 2), path="gpu")
    assert codes.tolist() == [[[0, 7], [0, 0]]]
    assert torch.equal(x, kept)


def test_a_strided_slice_decodes_alike() -> None:
    given = tables(2, 16, [4, 4, 8])
    codes = torch.randint(0, 256, (1, 6, 100), dtype=torch.uint8, device=DEVICE)[..., 3:73]
    assert torch.equal(byte_decode(codes, given, path="gpu"), byte_decode(codes.clone(), given, path="gpu"))


def test_the_gpu_path_is_never_chosen_for_cpu_tensors() -> None:
    assert paths.available("byte_attention", "gpu")[0]
    assert choose_path("cpu").path != "gpu"
    assert choose_path("cuda").path == "gpu"
    assert choose_path("mps") == type(choose_path("mps"))("naive", "no kernel is written for device type 'mps'")


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert paths.available.__wrapped__("byte_encode", "gpu") == (False, "triton is not installed")
