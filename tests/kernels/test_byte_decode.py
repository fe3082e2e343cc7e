"""Decoding bytes: the compiled path gives the numbers of the definition."""

import pytest
import torch

from karhunen.kernels.byte_decode import available, byte_decode
from karhunen.kernels.byte_tables import ByteTables


def tables(sizes: list[list[int]], n_coefficients: int = 16) -> ByteTables:
    generator = torch.Generator().manual_seed(3)
    heads = [
        [
            (torch.randn(256, w, generator=generator), torch.randperm(n_coefficients, generator=generator)[:w])
            for w in head
        ]
        for head in sizes
    ]
    return ByteTables.from_planes(heads, n_coefficients)


@pytest.mark.parametrize("t", [0, 1, 63, 64, 1000])
@pytest.mark.parametrize("sizes", [[[4, 4, 4, 4]], [[1, 7, 3], [16], []]], ids=["equal", "ragged"])
def test_every_path_adds_the_named_entries(t: int, sizes: list[list[int]], nan_filled_memory: None) -> None:
    given = tables(sizes)
    codes = torch.randint(0, 256, (2, given.n_planes, t), dtype=torch.uint8, generator=torch.Generator().manual_seed(t))
    wanted = torch.zeros(2, len(sizes), t, 16)
    j = 0
    for head, widths in enumerate(sizes):
        for _ in widths:
            entries, index = given.plane(j)
            for k, c in enumerate(index.tolist()):
                wanted[:, head, :, c] += entries[codes[:, j].long(), k]
            j += 1
    for path in ("naive", "cpu"):
        assert torch.equal(byte_decode(codes, given, path=path), wanted), path


def test_a_strided_slice_of_a_larger_buffer_decodes_alike() -> None:
    given = tables([[4, 4], [8]])
    room = torch.randint(0, 256, (1, 3, 100), dtype=torch.uint8)
    part = room[..., :70]
    assert torch.equal(byte_decode(part, given, path="cpu"), byte_decode(part.clone(), given, path="naive"))


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        available("tpu")
