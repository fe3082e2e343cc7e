"""Byte codes as int8 look-ups: what comes back, what a second stage adds, what a gain is, what is refused."""

from dataclasses import replace

import pytest
import torch
from tests.closeness import SUM, assert_near
from tests.synthetic import seeded
from torch import Tensor

from karhunen.quantizers.base import Codes, QuantizerData
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.byte_vq import INDEX_BITS, ByteVQ, TableKind
from karhunen.quantizers.gains import GainKind
from karhunen.statistics.moments import Moments

KINDS: tuple[TableKind, ...] = ("free", "overlapping", "additive")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def trained(rates: Tensor, tables: TableKind = "free", gain: GainKind = "none", n: int = 2048) -> ByteQuantizer:
    x = normal(len(rates), n, rates.shape[1])
    return ByteVQ(gain=gain, n_iterations=3, tables=tables).fit(QuantizerData(rates, Moments.of(x), x))


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_decoded_is_coded_without_error(kind: TableKind) -> None:
    quantizer = trained(torch.full((2, 8), 2.0), kind)
    assert len(quantizer.widths) == 4
    first = quantizer.decode(quantizer.encode(normal(2, 2, 50, 8, seed=1)))
    assert torch.equal(quantizer.decode(quantizer.encode(first)), first)
    assert rms(first) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_coefficient_is_its_rows_times_its_scale(kind: TableKind) -> None:
    quantizer = trained(torch.full((1, 4), 4.0), kind)
    a, b = INDEX_BITS[kind]
    assert (len(quantizer.low), len(quantizer.high)) == (2**a, 2**b if b else 0)
    codes = quantizer.encode(normal(1, 1, 9, 4, seed=1))
    expected = torch.zeros(9, 4)
    column = 0
    for plane, size in enumerate(quantizer.plane_size.tolist()):
        for k in range(column, column + size):
            for token, byte in enumerate(codes.symbols[0, plane].tolist()):
                whole = int(quantizer.low[byte % 2**a, k]) + (int(quantizer.high[byte >> (8 - b), k]) if b else 0)
                expected[token, quantizer.coordinates[k]] += whole * quantizer.scale[k]
        column += size
    assert torch.equal(quantizer.decode(codes)[0, 0], expected)


def test_free_entries_use_the_whole_range_of_a_column() -> None:
    assert bool((trained(torch.full((2, 8), 2.0)).low.int().abs().amax(0) == 127).all())


def test_bytes_of_more_bits_a_coefficient_err_less_whatever_their_tables() -> None:
    x = normal(1, 1, 500, 8, seed=1)
    for kind in KINDS:
        errors = [
            rms(q.decode(q.encode(x)) - x) for q in (trained(torch.full((1, 8), r), kind) for r in (1.0, 2.0, 4.0))
        ]
        assert errors[0] > 1.4 * errors[1] > 2.5 * errors[2]


def test_a_second_byte_codes_what_the_first_left_over() -> None:
    """256 levels of a range of 8 σ, then 256 of what is left."""
    x = normal(1, 1, 500, 1, seed=1)
    one, two = trained(torch.full((1, 1), 8.0)), trained(torch.full((1, 1), 16.0))
    assert two.coordinates.tolist() == [0, 0]
    codes = two.encode(x)
    coarse = two.decode(Codes(torch.stack([codes.symbols[:, 0], torch.zeros_like(codes.symbols[:, 0])], 1), {}))
    assert torch.equal(codes.symbols[:, 0], one.encode(x).symbols[:, 0]), "the first stage does not know of the second"
    # the median: in the tails, where few samples were trained on, what is left over is as long as it is rare
    fine, plain = ((q.decode(q.encode(x)) - x).abs().median() for q in (two, one))
    assert fine < plain / 40
    assert rms(two.decode(codes) - x) < rms(coarse - x)


@pytest.mark.parametrize(("gain", "dtype"), [("float16", torch.float16), ("log8", torch.uint8)])
def test_a_level_four_times_as_high_changes_the_gain_alone(gain: GainKind, dtype: torch.dtype) -> None:
    quantizer, x = trained(torch.full((2, 8), 2.0), gain=gain), normal(1, 2, 20, 8, seed=1)
    codes, louder = quantizer.encode(x), quantizer.encode(4 * x)
    assert torch.equal(codes.symbols, louder.symbols)
    assert codes.side["gain"].dtype == dtype
    assert codes.side["gain"].shape == (1, 2, 20)
    by = 24 if gain == "log8" else 4 * codes.side["gain"] - codes.side["gain"]  # two octaves of twelve steps
    assert torch.equal(louder.side["gain"], codes.side["gain"] + by)
    assert_near(quantizer.decode(louder), 4 * quantizer.decode(codes), SUM)


def test_no_gain_is_no_side_tensor() -> None:
    assert trained(torch.full((1, 8), 2.0)).encode(normal(1, 1, 3, 8)).side == {}


@pytest.mark.parametrize("gain", ["none", "log8"])
def test_a_head_group_without_a_plane_decodes_to_zero(gain: GainKind) -> None:
    quantizer = trained(torch.full((2, 8), 2.0), gain=gain)
    n = int(quantizer.plane_size[:2].sum())
    first_only = replace(
        quantizer, plane_group=quantizer.plane_group[:2], plane_size=quantizer.plane_size[:2],
        coordinates=quantizer.coordinates[:n], low=quantizer.low[:, :n], high=quantizer.high[:, :n],
        scale=quantizer.scale[:n],
    )  # fmt: skip
    x = normal(1, 2, 10, 8, seed=1)
    codes = first_only.encode(x)
    assert torch.equal(codes.symbols, quantizer.encode(x).symbols[:, :2])
    back = first_only.decode(codes)
    assert torch.equal(back[:, 0], quantizer.decode(quantizer.encode(x))[:, 0])
    assert not back[:, 1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_no_plane_at_all_is_no_byte_and_zeros(kind: TableKind) -> None:
    quantizer = trained(torch.zeros(1, 8), kind)
    codes = quantizer.encode(normal(2, 1, 5, 8))
    assert codes.symbols.shape == (2, 0, 5)
    assert torch.equal(quantizer.decode(codes), torch.zeros(2, 1, 5, 8))


REFUSED = {
    "unknown gain 'loud'; known": {"gain": "loud"},
    r"scale has shape \(3,\); \(4,\) is wanted": {"scale": torch.ones(3)},
    r"coordinates has shape \(5,\); \(4,\) is wanted": {"coordinates": torch.arange(5)},
    "a coordinate lies outside 0 … 3": {"coordinates": torch.tensor([0, 1, 2, 4])},
    "plane_group names a group outside 0 … 0": {"plane_group": torch.tensor([0, 1])},
    r"plane_group \[0\] does not name a group for each of 2 planes": {"plane_group": torch.tensor([0])},
    "a plane covers no coefficient; leave it out": {"plane_size": torch.tensor([4, 0])},
    "9 and 0 rows; powers of two": {"low": torch.zeros(9, 4, dtype=torch.int8)},
    "a scale is NaN or infinite": {"scale": torch.tensor([1.0, torch.nan, 1.0, 1.0])},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_tables_that_do_not_belong_together_are_refused_when_made(reason: str) -> None:
    given = {
        "g": 1, "c": 4, "gain": "none", "plane_group": torch.tensor([0, 0]), "plane_size": torch.tensor([1, 3]),
        "coordinates": torch.arange(4), "low": torch.zeros(256, 4, dtype=torch.int8),
        "high": torch.zeros(0, 4, dtype=torch.int8), "scale": torch.ones(4),
    }  # fmt: skip
    unchecked = object.__new__(ByteQuantizer)  # as outside of tests, where no type is checked
    for name, value in (given | REFUSED[reason]).items():
        object.__setattr__(unchecked, name, value)
    with pytest.raises(ValueError, match=reason):
        unchecked.__post_init__()
    ByteQuantizer(**given)
