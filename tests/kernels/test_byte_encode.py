"""Byte encoding: the kernel gives the definition's bytes, and the bytes name the nearest entries."""

import pytest
import torch
from tests.closeness import SUM, assert_near
from torch import Tensor

from karhunen.kernels.byte_encode import available, naive
from karhunen.kernels.byte_tables import ByteTables


def tables(h: int, d: int, widths: list[int], generator: torch.Generator) -> ByteTables:
    """Planes of the given widths over shuffled coefficients; a sum above d wraps, which makes residual stages."""
    heads = []
    for _ in range(h):
        order = torch.randperm(d, generator=generator).repeat(2)[: sum(widths)]
        heads.append([(torch.randn(256, len(c), generator=generator).half(), c) for c in order.split(widths)])
    return ByteTables.from_planes(heads, d)


@pytest.mark.parametrize("widths", [[1, 2, 3, 4, 5, 8, 17, 24], [4] * 16, [3] * 40], ids=["ragged", "even", "residual"])
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("t", [1, 63, 64, 1000])
def test_kernel_gives_the_bytes_of_naive(t: int, n_threads: int, widths: list[int], nan_filled_memory: None) -> None:
    cpu = pytest.importorskip("karhunen.kernels.byte_encode.cpu")
    runs, reason = available("cpu")
    if not runs:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    example = tables(3, 64, widths, generator)
    x = torch.randn(2, 3, t, 64, generator=generator)
    assert torch.equal(cpu.byte_encode(x, example, n_threads=n_threads), naive.byte_encode(x, example))


def test_each_byte_names_the_nearest_entry() -> None:
    generator = torch.Generator().manual_seed(0)
    example = tables(1, 64, [1, 2, 3, 4, 5, 8, 17, 24], generator)
    x = torch.randn(1, 1, 200, 64, generator=generator)
    codes = naive.byte_encode(x, example)
    for j in range(example.n_planes):
        entries, index = example.plane(j)
        distances = torch.cdist(x[0, 0][:, index].double(), entries.double())
        chosen = distances.gather(1, codes[0, j].long()[:, None])[:, 0]
        assert_near(chosen, distances.amin(1), SUM)


def test_the_lowest_of_equal_entries_is_chosen() -> None:
    entries = torch.zeros(256, 2).half()
    entries[7:, 0] = 1.0
    example = ByteTables.from_planes([[(entries, torch.tensor([0, 1]))]], 2)
    x = torch.tensor([[[[0.0, 3.0], [1.0, -2.0]]]])
    for path in PATHS_HERE:
        assert codes_by(path, x, example).tolist() == [[[0, 7]]]


def test_an_entry_is_coded_by_its_own_index() -> None:
    generator = torch.Generator().manual_seed(0)
    example = tables(1, 8, [8], generator)
    entries, index = example.plane(0)
    x = torch.empty(1, 1, 256, 8)
    x[0, 0][:, index] = entries.float()
    for path in PATHS_HERE:
        assert codes_by(path, x, example).flatten().tolist() == list(range(256))


PATHS_HERE = [path for path in ("naive", "cpu") if available(path)[0]]


def codes_by(path: str, x: Tensor, example: ByteTables) -> Tensor:
    from karhunen.kernels.byte_encode import byte_encode

    return byte_encode(x, example, path=path)
