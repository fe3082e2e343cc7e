"""Vectors go into an engine's blocks and come out of them, whatever order its backend keeps them in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.serving.stand_in import Rounding, SideBySide, Transposed

from karhunen.serving.vllm.paged import PagedLayer

HEADS, TOKENS, D, E = 3, 32, 16, 16


def layer(impl: Any, block_tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> PagedLayer:
    view = torch.zeros(24, HEADS, TOKENS, D + E, dtype=dtype)
    return PagedLayer(SimpleNamespace(impl=impl), view, block_tokens, D, E)


@pytest.mark.parametrize("impl", [SideBySide(), Transposed()], ids=["side by side", "transposed"])
@pytest.mark.parametrize("blocks_in_one", [1, 2])
def test_what_is_written_is_read(impl: Any, blocks_in_one: int) -> None:
    paged = layer(impl, TOKENS * blocks_in_one)
    table, n = [7, 3, 5], 3 * TOKENS * blocks_in_one
    keys, values = torch.randn(HEADS, n, D).bfloat16(), torch.randn(HEADS, n, E).bfloat16()
    paged.write(keys, values, 0, table)
    got = paged.read(paged.snapshot(torch.tensor(table)))
    assert torch.equal(got[0], keys) and torch.equal(got[1], values)


@pytest.mark.parametrize("impl", [SideBySide(), Transposed()], ids=["side by side", "transposed"])
def test_a_run_within_blocks_leaves_the_rest(impl: Any) -> None:
    paged, table = layer(impl), [2, 9]
    before = torch.randn(HEADS, 2 * TOKENS, D).bfloat16()
    paged.write(before, before, 0, table)
    new = torch.randn(HEADS, 30, D).bfloat16()
    paged.write(new, new, 20, table)
    keys, values = paged.read(paged.snapshot(torch.tensor(table)))
    for got in (keys, values):
        assert torch.equal(got[:, 20:50], new)
        assert torch.equal(got[:, :20], before[:, :20]) and torch.equal(got[:, 50:], before[:, 50:])


def test_a_snapshot_does_not_follow_the_cache() -> None:
    paged = layer(SideBySide())
    paged.view.fill_(1)
    copy = paged.snapshot(torch.tensor([4]))
    paged.view.fill_(2)
    assert bool((copy == 1).all())


def test_finding_the_order_touches_no_block() -> None:
    paged = layer(Transposed())
    paged.view.fill_(3)
    _ = paged.order
    assert bool((paged.view == 3).all())


def test_a_cache_that_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="does not keep vectors as they are"):
        _ = layer(Rounding()).order


def test_a_backend_that_writes_inside_its_forward_is_refused() -> None:
    with pytest.raises(ValueError, match="attention-backend"):
        layer(object())


@pytest.mark.parametrize("shape", [(4, HEADS, TOKENS * 2 * D), (4, HEADS, 24, 2 * D), (4, HEADS, TOKENS, 0)])
def test_a_view_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="karhunen reads"):
        PagedLayer(SimpleNamespace(impl=SideBySide()), torch.zeros(shape), TOKENS, D, E)
