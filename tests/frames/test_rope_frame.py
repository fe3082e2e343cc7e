"""The block-relative frame is exact: attention scores do not know which frame keys were kept in."""

import pytest
import torch
from tests.closeness import assert_near
from tests.synthetic import rotary, seeded

from karhunen.frames.rope_frame import MOST_BLOCK_TOKENS, RopeFrame, join_heads, split_heads
from karhunen.statistics.rotary import Rotary

D, T = 16, 50

ROTARIES = {
    "llama": rotary(D),
    "interleaved": rotary(D, interleaved=True),
    "partial": rotary(D, 8),
    "partial_at_the_end": rotary(D, 8, offset=8),
    "turning_backwards": Rotary(-rotary(D).inv_freq),
}
BLOCKS = pytest.mark.parametrize("block", [1, 7, 64, None])
KINDS = pytest.mark.parametrize("kind", ROTARIES)


def double(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@KINDS
def test_rotations_compose_and_keep_norms(kind: str) -> None:
    turn, x, m, n = ROTARIES[kind], double(2, 3, T, D), torch.full((T,), 5), torch.arange(T)
    assert torch.allclose(turn.rotate(turn.rotate(x, m), n), turn.rotate(x, m + n))
    assert torch.allclose(turn.rotate(x, n).norm(dim=-1), x.norm(dim=-1))
    assert torch.allclose(turn.rotate(turn.rotate(x, n), -n), x)
    assert turn.n_rotated == (8 if "partial" in kind else D)


def test_a_rotation_turns_pairs_by_position_times_frequency() -> None:
    turn = Rotary(torch.tensor([0.5, 0.25]))
    got = turn.rotate(torch.tensor([[1.0, 0.0, 0.0, 1.0]]).double(), torch.tensor([2]))
    cos, sin = torch.cos(torch.tensor([1.0, 0.5])), torch.sin(torch.tensor([1.0, 0.5]))
    assert torch.allclose(got[0], torch.stack([cos[0], -sin[1], sin[0], cos[1]]).double())


@KINDS
@BLOCKS
def test_the_frame_is_undone_exactly(kind: str, block: int | None) -> None:
    frame, key = RopeFrame(block), double(2, 3, T, D)
    positions = torch.stack([torch.arange(T), torch.arange(T) - 9])  # a padded row has negative positions
    inside = frame.forward(key, positions, ROTARIES[kind])
    assert torch.allclose(frame.inverse(inside, positions, ROTARIES[kind], 3), key)
    if block is None:
        assert torch.equal(inside, key)


@KINDS
def test_block_one_is_the_key_before_rope_and_no_block_the_key_after(kind: str) -> None:
    turn, before, positions = ROTARIES[kind], double(1, 2, T, D), torch.arange(T)[None]
    after = turn.rotate(before, positions[:, None])
    assert torch.allclose(RopeFrame(1).forward(after, positions, turn), before)
    assert torch.equal(RopeFrame(None).forward(after, positions, turn), after)


@KINDS
@BLOCKS
def test_a_score_needs_the_query_turned_once_per_block(kind: str, block: int | None) -> None:
    """(R(m) q)ᵀ k = (R(m − n₀) q)ᵀ κ."""
    turn, frame, m = ROTARIES[kind], RopeFrame(block), 77
    query, key, positions = double(1, 1, D, seed=1), double(1, 1, T, D), torch.arange(T)[None]
    cached = turn.rotate(key, positions[:, None])
    scores = cached[0, 0] @ turn.rotate(query, torch.tensor([m]))[0, 0]
    kappa, starts = frame.forward(cached, positions, turn)[0, 0], frame.starts(positions)[0]
    turned = turn.rotate(query.expand(1, T, D), m - starts)[0]
    assert torch.allclose((kappa * turned).sum(-1), scores)
    assert len(set(starts.tolist())) == (T if block == 1 else 1 if block is None else -(-T // block))


@BLOCKS
def test_keys_of_equal_offset_share_a_frame_whatever_the_block(block: int | None) -> None:
    """The same unrotated key at n and n + B has the same coordinates: that is why block-relative keys compact."""
    if block is None:
        block = MOST_BLOCK_TOKENS
    turn, key = rotary(D), double(1, 1, 1, D)
    rows = [torch.tensor([[n]]) for n in (3, 3 + block)]
    inside = [RopeFrame(block).forward(turn.rotate(key, n[:, None]), n, turn) for n in rows]
    assert_near(inside[0], inside[1], 1e-6 if block > 1000 else 1e-9)


def test_joined_heads_lie_side_by_side() -> None:
    x = double(2, 3, T, 4)
    joined = join_heads(x)
    assert joined.shape == (2, 1, T, 12)
    assert torch.equal(joined[1, 0, 7, 4:8], x[1, 1, 7])
    assert torch.equal(split_heads(joined, 3), x)


@KINDS
@BLOCKS
@pytest.mark.parametrize("joined", [False, True])
def test_a_centered_frame_takes_the_turned_mean_away(kind: str, block: int | None, joined: bool) -> None:
    """A key that is its own mean before RoPE becomes zero, at every position and in every frame."""
    turn, mean, positions = ROTARIES[kind], double(2, D), torch.arange(T)[None]
    frame = RopeFrame(block, joined=joined, center=True)
    key = turn.rotate(mean[None, :, None].expand(1, 2, T, D), positions[:, None])
    inside = frame.forward(key, positions, turn, mean)
    assert inside.abs().max() < 1e-9
    assert torch.allclose(frame.inverse(inside, positions, turn, 2, mean), key)


def test_a_block_longer_than_any_table_is_refused() -> None:
    assert RopeFrame(MOST_BLOCK_TOKENS).needs_rotary
    with pytest.raises(ValueError, match=r"block_tokens=1000000000 is more than .* use 16384 at most, or None"):
        RopeFrame(10**9)


@pytest.mark.parametrize("block", [0, -1])
def test_a_block_without_tokens_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=rf"block_tokens={block} is not a block; use 1, 2, \.\.\. or None"):
        RopeFrame(block)


def test_a_rotation_wider_than_the_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="coordinates 0 to 15 does not fit vectors of 8"):
        rotary(16).rotate(double(1, 8), torch.tensor([1]))
