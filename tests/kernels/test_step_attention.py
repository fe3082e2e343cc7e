"""A whole decode step against its definition: coded tokens, exact ones, several workers, tokens that nobody sees."""

from dataclasses import replace

import pytest
import torch
from tests.closeness import assert_near
from tests.kernels.examples import Example
from tests.synthetic import seeded

from karhunen.kernels.step_attention import available, naive

cpu = pytest.importorskip("karhunen.kernels.step_attention.cpu")
pytestmark = pytest.mark.skipif(not available("cpu")[0], reason=available("cpu")[1])

CASES = {
    "one head": Example(h=1, r=1),
    "grouped heads": Example(t=1300, first=37),
    "seven rows": Example(r=7, t=700),
    "rows of a batch": Example(b=2, r=1, t=2300),
    "joined heads": Example(joined=True, t=1100),
    "no frame turns": Example(block=None, t=700, first=0),
    "gains": Example(gain="half", t=600),
    "a few tokens": Example(t=3),
}


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("sizes", [(4, 128), (0, 1, 7)])
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_its_definition(
    name: str, sizes: tuple[int, ...], n_threads: int, nan_filled_memory: None
) -> None:
    example = CASES[name]
    generator, d, e = seeded(7), example.d, example.d - 4
    query, keys, values = example.query(), example.side(2), example.side(3)
    pieces = [
        tuple(torch.randn(example.b, example.h, n, width, generator=generator) for width in (d, e)) for n in sizes
    ]
    matrix = torch.randn(example.h, values.tables.n_coefficients, e, generator=generator)
    offset = torch.randn(example.h, e, generator=generator)
    hidden = (torch.zeros(2, dtype=torch.int64), torch.tensor([0, example.t - 1]))
    settings = {"first_position": example.first, "scale": d**-0.5, "hidden": hidden}
    exact = [(key.double(), value.double()) for key, value in pieces]
    expected = naive.step_attention(
        query.double(), keys, values, example.frames(), exact, matrix.double(), offset.double(), **settings
    )
    actual = cpu.step_attention(
        query, keys, values, example.frames(), pieces, matrix, offset, n_threads=n_threads, **settings
    )
    assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
    assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)


def test_where_no_coded_token_is_seen_the_exact_ones_are_all() -> None:
    example = Example(t=2)
    generator = seeded(7)
    keys, values = example.side(2), example.side(3)
    piece = tuple(torch.randn(1, 2, 5, example.d, generator=generator) for _ in range(2))
    matrix = torch.randn(2, values.tables.n_coefficients, example.d, generator=generator)
    hidden = (torch.zeros(2, dtype=torch.int64), torch.arange(2))
    arguments = (example.frames(), [piece], matrix, torch.ones(2, example.d))
    actual = cpu.step_attention(example.query(), keys, values, *arguments, first_position=4, hidden=hidden)
    alone = torch.nn.functional.scaled_dot_product_attention(example.query(), *piece, scale=1.0)
    assert_near(actual.mean, alone, cpu.TOLERANCE)


def test_a_thread_keeps_what_a_smaller_call_left() -> None:
    """Standing calls serve problems of other sizes after one another."""
    for t in (900, 40, 900):
        example = replace(CASES["grouped heads"], t=t)
        keys, values, generator = example.side(2), example.side(3), seeded(7)
        piece = tuple(torch.randn(1, 2, 5, example.d, generator=generator) for _ in range(2))
        matrix = torch.randn(2, values.tables.n_coefficients, example.d, generator=generator)
        arguments = (keys, values, example.frames(), [piece], matrix, torch.zeros(2, example.d))
        actual = cpu.step_attention(example.query(), *arguments, first_position=37)
        expected = naive.step_attention(example.query(), *arguments, first_position=37)
        assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
