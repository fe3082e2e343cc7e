"""The scan on a GPU is its definition: on a GPU if there is one, else under Triton's interpreter (conftest.py).

Examples are those of the CPU's scan; what is peculiar to the GPU is how a call is cut.
"""

from dataclasses import replace

import pytest
import torch
from tests.closeness import assert_near
from tests.kernels.examples import Example
from tests.kernels.test_scan_attention import CASES, without
from tests.synthetic import seeded
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from karhunen.kernels import triton_launch
from karhunen.kernels.byte_attention import CodedTokens
from karhunen.kernels.byte_decode import byte_decode
from karhunen.kernels.byte_encode import byte_encode
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.entry_quads import entry_quads
from karhunen.kernels.scan.emit import KINDS
from karhunen.kernels.scan_attention import Frames, gpu, naive, scan_attention
from karhunen.kernels.softmax import Partial
from karhunen.kernels.split_attention.launch import Launch

DEVICE = torch.device("cpu" if triton_launch.INTERPRETED else "cuda")


def on_device(side: CodedTokens) -> CodedTokens:
    """The same bytes in a buffer of the device that is poisoned beyond them."""
    b, s, t = side.codes.shape
    codes = torch.full((b, s, t + 37), 255, dtype=torch.uint8, device=DEVICE)[..., :t]
    codes.copy_(side.codes)
    gain = None if side.gain is None else side.gain.to(DEVICE)
    return CodedTokens(codes, side.tables, gain, side.gain_levels)


def moved(x: object) -> object:
    if isinstance(x, tuple):
        return tuple(map(moved, x))
    return x.to(DEVICE) if isinstance(x, Tensor) else x


def check(
    example: Example,
    *,
    launch: Launch | None = None,
    n_splits: int | None = None,
    sides: tuple[CodedTokens, CodedTokens] | None = None,
    frames: Frames | None = None,
    folded: bool = False,
    **settings,
) -> Partial:
    """The scan equals its definition in float64; what it gave."""
    keys, values = sides or (example.side(2), example.side(3))
    query, frames = example.query(), frames or example.frames()
    shared = {"first_position": example.first, "scale": example.d**-0.5, **settings}
    expected = naive.scan_attention(query.double(), keys, values, frames, **shared)
    given = {name: moved(x) for name, x in shared.items()}
    actual = gpu.scan_attention(
        query.to(DEVICE),
        on_device(keys),
        on_device(values),
        frames,
        launch=launch,
        n_splits=n_splits,
        folded=folded,
        **given,
    )
    assert_near(actual.mean.cpu(), expected.mean, gpu.TOLERANCE)
    assert_near(actual.log_sum.cpu(), expected.log_sum, gpu.TOLERANCE)
    return actual


@pytest.mark.parametrize("name", CASES)
def test_a_scan_equals_its_definition(name: str, nan_filled_memory: None) -> None:
    example = CASES[name]
    check(replace(example, t=min(example.t, 300)))


@pytest.mark.parametrize("launch", [Launch(16, 4), Launch(32, 4), Launch(128, 4)], ids=lambda launch: str(launch.tile))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_table_is_read_in_every_tile(kind: tuple[int, int], launch: Launch) -> None:
    check(Example(kind=kind, t=200, h=1, gain="levels"), launch=launch, n_splits=2)


@pytest.mark.parametrize(
    ("block", "first", "rows", "settings"),
    [(64, 41, 3, {}), (None, 0, 1, {"softcap": 3.0}), (32, 0, 9, {"mask": torch.arange(100)[None] % 3 > 0})],
)  # fmt: skip
def test_scores_from_folded_tables_equal_their_definition(
    block: int | None, first: int, rows: int, settings: dict[str, object], nan_filled_memory: None
) -> None:
    """Where a tile ends in the middle of a block, and where padding fills up quads and rows."""
    example = Example(kind=(4, 4), t=100, h=1, r=rows, first=first, block=block, gain="levels")
    check(example, launch=Launch(64, 4), folded=True, n_splits=2, **settings)


def test_folded_tables_are_sums_of_two_look_ups_of_16() -> None:
    with pytest.raises(ValueError, match="keys are look-ups of 6 and 6 bits; folded are those of 4 and 4"):
        check(Example(kind=(6, 6), t=70), folded=True)


@pytest.mark.parametrize(("key", "value"), [((8, 0), (4, 4)), ((4, 4), (6, 6))], ids=str)
def test_keys_and_values_may_differ_in_kind(key: tuple[int, int], value: tuple[int, int]) -> None:
    example = Example(kind=key, t=70)
    check(example, sides=(example.side(2), replace(example, kind=value).side(3)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("first", [0, 1, 2, 3, 62])
def test_words_are_cut_wherever_tokens_begin(kind: tuple[int, int], first: int) -> None:
    """Blocks and buffers begin at any address, and the last word is not whole."""
    example = Example(kind=kind, t=133, h=1, first=first)
    for begin in range(4):
        sides = tuple(
            replace(side, codes=torch.cat([side.codes.new_full((1, side.codes.shape[1], 8), 255), side.codes], -1))
            for side in (example.side(2), example.side(3))
        )
        cut = tuple(replace(side, codes=side.codes[..., 8 - begin : 8 - begin + 133]) for side in sides)
        expected = naive.scan_attention(example.query().double(), *cut, example.frames(), first_position=first)
        given = [replace(side, codes=side.codes.to(DEVICE)) for side in cut]
        actual = gpu.scan_attention(example.query().to(DEVICE), *given, example.frames(), first_position=first)
        assert_near(actual.mean.cpu(), expected.mean, gpu.TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_queries_of_any_dtype_and_stride_are_read(dtype: torch.dtype) -> None:
    example = Example(b=2, t=70)
    query = example.query().to(dtype).transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE)
    keys, values, frames = example.side(2), example.side(3), example.frames()
    expected = naive.scan_attention(query.cpu().double(), keys, values, frames, scale=0.25)
    actual = gpu.scan_attention(query, on_device(keys), on_device(values), frames, scale=0.25)
    assert actual.mean.dtype == actual.log_sum.dtype == torch.float32
    assert_near(actual.mean.cpu(), expected.mean, gpu.TOLERANCE)


@pytest.mark.parametrize(("n_heads", "head"), [(1, 0), (2, 1)])
def test_a_head_without_a_byte_has_scores_of_the_bias_alone_and_a_mean_of_zero(n_heads: int, head: int) -> None:
    example = Example(h=n_heads, t=70)
    sides = tuple(without(example.side(seed), head, n_heads) for seed in (2, 3))
    assert not check(example, sides=sides).mean[:, head].any()


def test_masks_hide_tokens() -> None:
    mask = torch.rand(2, 150, generator=seeded(5)) > 0.5
    mask[1] = False  # a row that sees nothing
    example = Example(b=2, t=150)
    seen = check(example, mask=mask)
    assert seen.mean[1].eq(0).all()
    assert seen.log_sum[1].eq(-torch.inf).all()
    check(example, mask=torch.randn(2, 150, generator=seeded(6)))
    check(example, mask=torch.zeros(2, 150).masked_fill(~mask, torch.finfo(torch.float32).min), softcap=2.0)


@pytest.mark.parametrize("kind", ["", "bool", "float"])
def test_hidden_tokens_are_seen_by_nobody(kind: str) -> None:
    hidden = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 149, 60, 61], dtype=torch.int32)
    mask = torch.rand(2, 150, generator=seeded(5)) > 0.3
    given = {"": None, "bool": mask, "float": torch.randn(2, 150, generator=seeded(6))}[kind]
    before = None if given is None else given.clone()
    check(Example(b=2, t=150), mask=given, hidden=hidden)
    assert given is None or torch.equal(given, before), "the mask is the caller's"


@pytest.mark.parametrize("joined", [False, True])
def test_more_rows_than_a_program_holds_are_read(joined: bool) -> None:
    check(Example(r=40, t=70, joined=joined), launch=Launch(64, 4))


def test_a_constant_bias_is_one_number_a_block() -> None:
    example = Example(t=150)
    frames = replace(example.frames(), mean=torch.zeros(2, 16))
    check(example, frames=frames)
    check(example, frames=replace(frames, offset=torch.zeros(2, 16)))


def test_magnitudes_beyond_float16_are_scaled_into_it() -> None:
    example = Example(t=70)
    frames = example.frames()
    check(example, frames=replace(frames, matrix=frames.matrix * 1e6, offset=frames.offset * 0, mean=frames.mean * 0),
          scale=1e-6)  # fmt: skip
    frames = replace(frames, mean=frames.mean * 1e6, offset=frames.offset * 1e6)
    check(example, frames=frames, scale=1e-6)


def test_no_tokens_and_queries_of_zeros() -> None:
    example = Example(t=0)
    part = gpu.scan_attention(
        example.query().to(DEVICE), on_device(example.side(2)), on_device(example.side(3)), example.frames()
    )
    assert part.mean.eq(0).all()
    assert part.log_sum.eq(-torch.inf).all()
    example = Example(t=70)
    part = gpu.scan_attention(
        torch.zeros(1, 2, 3, 16, device=DEVICE), on_device(example.side(2)), on_device(example.side(3)),
        example.frames(),
    )  # fmt: skip
    assert_near(part.log_sum.cpu(), torch.full((1, 2, 3), 70.0).log(), 1e-5)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    example = Example(t=8)
    query, keys, values, frames = example.query(), example.side(2), example.side(3), example.frames()
    with pytest.raises(ValueError, match="coefficients"):
        gpu.scan_attention(query[..., :8], keys, values, frames)
    with pytest.raises(ValueError, match="tokens are wanted"):
        gpu.scan_attention(query, keys, Example(t=9).side(3), frames)
    with pytest.raises(ValueError, match="give the same"):
        gpu.scan_attention(query, keys, replace(example, joined=True).side(3), frames)
    with pytest.raises(ValueError, match="mask"):
        gpu.scan_attention(query, keys, values, frames, mask=torch.ones(1, 9))
    with pytest.raises(ValueError, match="tokens are wanted"):
        scan_attention(query, keys, Example(b=2, t=8).side(3), frames, path="gpu")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_quads_of_look_ups_hold_every_entry(kind: tuple[int, int]) -> None:
    tables = replace(Example(kind=kind), sizes=(1, 2, 3, 9)).side(2).tables
    quads, (a, b) = entry_quads(tables, torch.device("cpu")), kind
    byte = torch.arange(256)
    word = quads.low.long()[..., byte % 2**a] + (quads.high.long()[..., byte // 2 ** (8 - b)] if b else 0)
    digits = (word[..., None] // 256 ** torch.arange(4)) % 256 - 128  # [h n 256 4]
    entries = digits.float() * quads.scale.view(2, -1, 1, 4)
    for j in range(tables.n_planes):
        head, (wanted, index) = j // 4, tables.plane(j)
        mine = quads.plane[head] == j
        if j % 4 == 0:
            mine[7:] = False  # padding names the first plane
        places = entries[head][mine].permute(1, 0, 2).flatten(1)[:, : len(index)]
        assert torch.equal(places, wanted)
        assert torch.equal(quads.coefficient[head].view(-1, 4)[mine].flatten()[: len(index)].long(), index.long())


def codable(kind: tuple[int, int]) -> tuple[ByteTables, Tensor]:
    tables = Example(kind=kind).side(2).tables
    x = torch.randn(2, 2, 70, 16, generator=seeded(3)) * tables.entries.std()
    x[0, 0, :3] = 0.0  # entries of equal length tie
    return tables, x


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_coding_gives_the_bytes_and_numbers_of_naive(kind: tuple[int, int], nan_filled_memory: None) -> None:
    tables, x = codable(kind)
    codes = byte_encode(x.to(DEVICE), tables, path="gpu")
    assert torch.equal(codes.cpu(), byte_encode(x, tables, path="naive"))
    assert torch.equal(byte_decode(codes, tables, path="gpu").cpu(), byte_decode(codes.cpu(), tables, path="naive"))


def test_equal_rows_of_a_table_give_the_lowest_byte() -> None:
    """Additive rows often sum to the same entry: the byte must not depend on the machine."""
    tables, x = codable((4, 4))
    lookups = tables.lookups
    assert lookups is not None
    same = replace(lookups, low=lookups.low[:1].expand(16, -1).contiguous())
    given = ByteTables.of_lookups(same, tables.coefficient, tables.column_start, tables.plane_start, 16)
    codes = byte_encode(x.to(DEVICE), given, path="gpu")
    assert not (codes[:, :, 4:] & 15).any()
    assert torch.equal(codes.cpu(), byte_encode(x, given, path="naive"))
