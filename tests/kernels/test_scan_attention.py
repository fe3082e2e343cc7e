"""The scan of bytes against its definition, in every width of vector that runs here."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from tests.closeness import assert_near
from tests.kernels.examples import Example
from tests.synthetic import seeded

from karhunen.kernels.byte_attention import CodedTokens
from karhunen.kernels.byte_tables import ByteTables, Lookups
from karhunen.kernels.scan import isa
from karhunen.kernels.scan.emit import KINDS
from karhunen.kernels.scan.tokens import place
from karhunen.kernels.scan_attention import cpu, naive
from karhunen.kernels.softmax import Partial

needs_cpu = pytest.mark.skipif(not cpu.available()[0], reason=cpu.available()[1])
WIDTHS = isa.widths()


def check(example: Example, width: int, n_threads: int = 1, **settings) -> Partial:
    """The scan equals its definition in float64; what it gave."""
    query, keys, values, frames = example.query(), example.side(2), example.side(3), example.frames()
    shared = {"first_position": example.first, "scale": example.d**-0.5, **settings}
    expected = naive.scan_attention(query.double(), keys, values, frames, **shared)
    actual = cpu.scan_attention(query, keys, values, frames, n_threads=n_threads, width=width, **shared)
    assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
    assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)
    return actual


CASES = {
    "one token": Example(t=1),
    "below a group": Example(t=63, first=0),
    "one group": Example(t=64, first=0),
    "past a group": Example(t=65, first=0),
    "many spans": Example(t=1300, first=37),
    "no frame turns": Example(block=None, t=700, first=0),
    "short blocks": Example(block=16, t=100, first=3),
    "blocks of odd size": Example(block=24, t=100, first=5),
    "positions below zero": Example(first=-9),
    "far positions": Example(first=100_000),
    "some coordinates stay": Example(d=24, rest=8, sizes=(4, 9, 11)),
    "no mean": Example(mean=False),
    "half gains": Example(gain="half"),
    "gain levels": Example(gain="levels"),
    "rows of a batch": Example(b=2, r=1, t=700),
    "seven rows": Example(r=7),
    "eight rows": Example(r=8),
    "joined heads": Example(joined=True),
    "no bytes at all": Example(sizes=(), d=16, t=70),
    "wide heads": Example(d=80, sizes=(1,) * 30 + (2,) * 25),
}


@needs_cpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_a_scan_equals_its_definition(name: str, width: int, nan_filled_memory: None) -> None:
    check(CASES[name], width)


@needs_cpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_table_is_read(kind: tuple[int, int], width: int) -> None:
    check(Example(kind=kind, t=200), width)


def without(side: CodedTokens, head: int, n_heads: int) -> CodedTokens:
    """One head of these has no plane."""
    tables, lookups = side.tables, side.tables.lookups
    assert lookups is not None
    per_head = tables.n_planes // n_heads
    planes = [j for j in range(tables.n_planes) if j // per_head != head]
    sizes = [tables.column_start[j + 1] - tables.column_start[j] for j in planes]
    mine = [torch.arange(tables.column_start[j], tables.column_start[j + 1]) for j in planes]
    columns = torch.cat([torch.empty(0, dtype=torch.int64), *mine])
    fewer = ByteTables.of_lookups(
        Lookups(lookups.low[:, columns], lookups.high[:, columns], lookups.scale[columns]),
        tables.coefficient[columns],
        tuple(accumulate(sizes, initial=0)),
        tuple(accumulate((per_head * (i != head) for i in range(n_heads)), initial=0)),
        tables.n_coefficients,
    )
    return replace(side, codes=side.codes[:, planes], tables=fewer)


@needs_cpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("n_heads", "head"), [(1, 0), (2, 0), (2, 1)])
def test_a_head_without_a_byte_has_scores_of_the_bias_alone_and_a_mean_of_zero(
    n_heads: int, head: int, width: int, nan_filled_memory: None
) -> None:
    example = Example(h=n_heads)
    query, frames = example.query(), example.frames()
    keys, values = (without(example.side(seed), head, n_heads) for seed in (2, 3))
    settings = {"first_position": 4, "scale": 0.25}
    expected = naive.scan_attention(query.double(), keys, values, frames, **settings)
    actual = cpu.scan_attention(query, keys, values, frames, n_threads=1, width=width, **settings)
    assert not actual.mean[:, head].any()
    assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
    assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)


@needs_cpu
@pytest.mark.parametrize("width", WIDTHS)
def test_masks_hide_tokens(width: int) -> None:
    mask = torch.rand(2, 700, generator=seeded(5)) > 0.5
    mask[1] = False  # a row that sees nothing
    seen = check(Example(b=2, t=700), width, mask=mask)
    assert bool((seen.mean[1] == 0).all())
    assert bool((seen.log_sum[1] == -torch.inf).all())
    check(Example(b=2, t=700), width, mask=torch.randn(2, 700, generator=seeded(6)))


@needs_cpu
@pytest.mark.parametrize("width", WIDTHS)
def test_hidden_tokens_are_seen_by_nobody(width: int) -> None:
    rows, tokens = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 699, 60, 61])
    check(Example(b=2, t=700), width, hidden=(rows, tokens))
    check(Example(t=1700), width, hidden=(torch.zeros(4, dtype=torch.int32), torch.tensor([0, 59, 60, 1699])))


@needs_cpu
@pytest.mark.parametrize("width", WIDTHS)
def test_scores_are_capped(width: int) -> None:
    check(Example(), width, softcap=2.0)


@needs_cpu
def test_threads_and_token_ranges_do_not_change_the_result() -> None:
    example = Example(t=5000, h=1)
    alone, together = check(example, WIDTHS[0]), check(example, WIDTHS[0], n_threads=2)
    assert_near(together.mean, alone.mean, cpu.TOLERANCE)


@needs_cpu
def test_equal_scores_give_the_plain_mean() -> None:
    """A query of zeros and no bias: every token weighs the same, and the log-sum is the number of tokens."""
    example = Example(mean=False, t=1000)
    keys, values, frames = example.side(2), example.side(3), replace(example.frames(), offset=torch.zeros(2, 16))
    seen = cpu.scan_attention(torch.zeros(1, 2, 3, 16), keys, values, frames, n_threads=1)
    expected = torch.zeros(2, 16, dtype=torch.float64)
    for j in range(values.tables.n_planes):
        entries, index = values.tables.plane(j)
        expected[j // len(example.sizes)].index_add_(0, index, entries.double()[values.codes[0, j].long()].mean(0))
    assert_near(seen.mean[0, :, 0], expected, 1e-5)
    assert_near(seen.log_sum, torch.full((1, 2, 3), 1000.0).log(), 1e-5)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_a_groups_places_are_each_taken_once(width: int) -> None:
    assert sorted(place(i, width) for i in range(width)) == list(range(width))


@needs_cpu
def test_codes_whose_tokens_are_apart_are_refused() -> None:
    example = Example(t=8)
    keys, values = example.side(2), example.side(3)
    apart = replace(keys, codes=keys.codes.repeat_interleave(2, dim=-1)[..., ::2])
    with pytest.raises(ValueError, match="along the token axis"):
        cpu.scan_attention(example.query(), apart, values, example.frames())


@needs_cpu
def test_a_side_and_frames_that_do_not_fit_the_query_are_refused() -> None:
    """Nothing is read outside of what was given."""
    example = Example(b=2, t=70)
    query, keys, values, frames = example.query(), example.side(2), example.side(3), example.frames()
    fewer = replace(values, codes=values.codes[:, :, :-1].contiguous())
    with pytest.raises(ValueError, match="values hold batch 2, 2 heads, 69 tokens"):
        cpu.scan_attention(query, keys, fewer, frames)
    with pytest.raises(ValueError, match="keys hold batch 2, 2 heads, 70 tokens; batch 3"):
        cpu.scan_attention(query[[0, 1, 1]], keys, values, frames)
    with pytest.raises(ValueError, match="for 1 heads"):
        cpu.scan_attention(query[:, :1], keys, values, frames)
    with pytest.raises(ValueError, match="mask has shape"):
        cpu.scan_attention(query, keys, values, frames, mask=torch.ones(2, 69, dtype=torch.bool))


def test_sums_beyond_int8_are_refused() -> None:
    low = torch.full((16, 1), 100, dtype=torch.int8)
    with pytest.raises(ValueError, match="leaves int8"):
        Lookups(low, low, torch.ones(1))
    with pytest.raises(ValueError, match="powers of two"):
        Lookups(low[:9], low, torch.ones(1))


def test_an_entry_is_the_sum_of_two_rows_times_its_scale() -> None:
    low, high = torch.arange(16, dtype=torch.int8)[:, None], 2 * torch.arange(16, dtype=torch.int8)[:, None]
    entries = Lookups(low, high, torch.tensor([0.5])).entries()
    assert entries[0x35, 0] == (5 + 2 * 3) * 0.5
    rows = torch.arange(64, dtype=torch.int8)[:, None]
    shared = Lookups(rows, rows, torch.ones(1))
    assert shared.entries()[0b10110101, 0] == 0b110101 + 0b101101
