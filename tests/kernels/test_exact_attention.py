"""Exact tokens of a decode step: the kernel is its definition, whatever the layout of its pieces."""

import re
from types import SimpleNamespace

import pytest
import torch
from tests.closeness import assert_near
from torch import Tensor

from karhunen.kernels import paths
from karhunen.kernels.exact_attention import CodedPart, naive
from karhunen.kernels.softmax import Partial


def piece(n: int, b: int, h: int, d: int, e: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cut from larger, poisoned buffers whose token and head axes are the other way round."""
    sides = []
    for width in (d, e):
        buffer = torch.full((b, n + 3, h, width + 2), torch.nan)
        view = buffer.transpose(1, 2)[:, :, 1 : n + 1, 1 : width + 1]
        view.copy_(torch.randn(b, h, n, width, generator=generator))
        sides.append(view)
    return sides[0], sides[1]


@pytest.mark.parametrize("with_coded", [False, True])
@pytest.mark.parametrize("sizes", [(4, 128, 3), (0, 9), (1,), (8, 0, 0), (15, 17, 1), (33, 31, 127)])
@pytest.mark.parametrize(("b", "h", "r", "d", "e"), [(1, 3, 3, 64, 64), (2, 1, 5, 80, 36), (1, 2, 1, 7, 3)])
def test_kernel_equals_naive(
    b: int, h: int, r: int, d: int, e: int, sizes: tuple[int, ...], with_coded: bool, nan_filled_memory: None
) -> None:
    cpu = pytest.importorskip("karhunen.kernels.exact_attention.cpu")
    runs, reason = paths.available("exact_attention", "cpu")
    if not runs:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(b, h, r, d, generator=generator)
    pieces = [piece(n, b, h, d, e, generator) for n in sizes]
    coded = None
    if with_coded:
        log_sum = 5 * torch.randn(b, h, r, generator=generator)
        log_sum[0, 0, 0] = -torch.inf  # a row that sees no coded token
        mean = torch.randn(b, h, r, 24, generator=generator)
        matrix, offset = torch.randn(h, 24, e, generator=generator) / 5, torch.randn(h, e, generator=generator)
        coded = CodedPart(Partial(mean, log_sum), matrix, offset)
    expected = naive.exact_attention(
        query.double(), [(k.double(), v.double()) for k, v in pieces], coded, scale=d**-0.5
    )
    actual = cpu.exact_attention(query, pieces, coded, scale=d**-0.5)
    assert_near(actual.mean, expected.mean, cpu.TOLERANCE)
    assert_near(actual.log_sum, expected.log_sum, cpu.TOLERANCE)


def test_too_many_pieces_are_refused() -> None:
    cpu = pytest.importorskip("karhunen.kernels.exact_attention.cpu")
    query = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="at most 3"):
        cpu.exact_attention(query, [(torch.zeros(1, 1, 1, 8),) * 2] * 4, None, scale=1.0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("key", (2, 2, 5, 8)),  # heads, then all else that is read by address
        ("key", (1, 3, 5, 8)),
        ("key", (2, 3, 5, 7)),
        ("value", (2, 3, 4, 6)),
        ("value", (2, 3, 5, 9)),
        ("matrix", (2, 4, 6)),
        ("matrix", (3, 5, 6)),
        ("matrix", (3, 4, 7)),
        ("offset", (2, 6)),
        ("offset", (3, 5)),
        ("mean", (2, 2, 1, 4)),
        ("mean", (2, 3, 2, 4)),
        ("log_sum", (2, 3, 2)),
    ],
)
def test_shapes_that_do_not_fit_the_query_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """Nothing is read outside of what was given."""
    cpu = pytest.importorskip("karhunen.kernels.exact_attention.cpu")
    shapes = {"key": (2, 3, 5, 8), "value": (2, 3, 5, 6), "matrix": (3, 4, 6), "offset": (3, 6)}
    shapes |= {"mean": (2, 3, 1, 4), "log_sum": (2, 3, 1), name: shape}
    x = {part: torch.zeros(size) for part, size in shapes.items()}
    partial = SimpleNamespace(mean=x["mean"], log_sum=x["log_sum"])
    coded = SimpleNamespace(partial=partial, matrix=x["matrix"], offset=x["offset"])
    pieces = [(torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 6)), (x["key"], x["value"])]
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        cpu.exact_attention(torch.zeros(2, 3, 1, 8), pieces, coded, scale=1.0)


def test_the_map_of_a_step_fits_its_heads() -> None:
    cpu = pytest.importorskip("karhunen.kernels.exact_attention.cpu")
    parts, matrix, offset = cpu.Parts(0, 0, 1, 4), torch.zeros(1, 4, 8), torch.zeros(1, 8)
    pieces = [(torch.zeros(1, 2, 3, 8),) * 2]
    with pytest.raises(ValueError, match="does not fit 2 heads of 4 coefficients and values of 8"):
        cpu.attend(torch.zeros(1, 2, 1, 8), pieces, parts, matrix, offset, scale=1.0)
