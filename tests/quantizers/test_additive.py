"""Training of look-ups that add: what sums reach, what a tree's order is, and that integers say the same."""

import pytest
import torch
from tests.closeness import assert_near
from tests.synthetic import seeded
from torch import Tensor

from karhunen.quantizers.additive import _solved, as_integers, in_tree_order, row_choice, sums, train_additive
from karhunen.quantizers.kmeans import kmeans

NIBBLES, OVERLAPPING = (4, 4), (6, 6)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def mse(x: Tensor, entries: Tensor) -> float:
    return float(torch.cdist(x, entries).amin(-1).square().mean())


def test_added_look_ups_beat_a_product_code_of_the_same_rows() -> None:
    """Where coordinates are correlated: a product code's sixteen rows see half of them each, an additive code's all.
    Look-ups that overlap do better, and free entries best."""
    x = (normal(4096, 4) @ normal(4, 4, seed=3))[None]
    halves = [x[..., part].contiguous() for part in (slice(2), slice(2, 4))]
    product = sum(mse(half, kmeans(half, 16, 20, 0)) for half in halves)
    additive, overlapping = (mse(x, sums(train_additive(x, bits, [4], 10, 0), bits)) for bits in (NIBBLES, OVERLAPPING))
    free = mse(x, kmeans(x, 256, 10, 0))
    assert free < overlapping < additive < product / 2


@pytest.mark.parametrize("bits", [NIBBLES, OVERLAPPING])
def test_sums_of_known_choices_are_recovered_to_the_noise(bits: tuple[int, int]) -> None:
    """One least-squares solve: n samples of noise σ leave each sum within σ / √(n / 256), the ridge a little more."""
    n, noise = 65536, 0.1
    choice = row_choice(bits, torch.device("cpu"))
    planted = choice.float() @ normal(choice.shape[1], 3, seed=1)
    byte = torch.randint(0, 256, (1, n), generator=seeded(2))
    x = planted[byte] + noise * normal(1, n, 3, seed=3)
    start = torch.zeros(1, 2 ** bits[0], 3), torch.zeros(1, 2 ** bits[1], 3)
    found = sums(_solved(x, byte, start, choice), bits)[0]
    assert float((found - planted).square().mean().sqrt()) < noise / 10
    assert float(planted.square().mean().sqrt()) > 1


@pytest.mark.parametrize("bits", [NIBBLES, OVERLAPPING])
def test_a_planted_ladder_is_recovered_nearly_to_its_noise(bits: tuple[int, int]) -> None:
    """256 levels one apart are sums of any kind; k-means alone, where the training starts, merges and splits some."""
    byte = torch.randint(0, 256, (8192,), generator=seeded(9))
    x = (byte + 0.2 * normal(8192, seed=7))[None, :, None]
    true = mse(x, torch.arange(256.0)[None, :, None])
    assert mse(x, sums(train_additive(x, bits, [1], 10, 0), bits)) < 1.6 * true


@pytest.mark.parametrize("seed", range(3))
def test_tree_order_is_a_permutation_whose_first_cut_is_across_the_main_axis(seed: int) -> None:
    entries = normal(1, 256, 3, seed=seed) * torch.tensor([8.0, 1.0, 0.5])
    ordered = in_tree_order(entries)[0]
    assert sorted(map(tuple, ordered.tolist())) == sorted(map(tuple, entries[0].tolist()))
    centered = entries[0].double() - entries[0].double().mean(0)
    axis = torch.linalg.eigh(centered.mT @ centered).eigenvectors[:, -1]
    along = ordered.double() @ axis
    lower, upper = along[:128], along[128:]
    assert lower.max() < upper.min() or upper.max() < lower.min()


def test_tree_order_of_one_coordinate_is_sorted() -> None:
    entries = normal(2, 256, 1)
    assert torch.equal(in_tree_order(entries), entries.sort(1).values)


def test_tree_order_puts_neighbours_together() -> None:
    """Entries that share all upper bits but the last are several times nearer than two of the table are."""
    entries = in_tree_order(normal(4, 256, 2))
    together = (entries[:, ::2] - entries[:, 1::2]).norm(dim=-1).mean()
    anyhow = torch.cdist(entries, entries).mean()
    assert together < anyhow / 5


@pytest.mark.parametrize("bits", [NIBBLES, OVERLAPPING])
def test_integers_say_what_rows_said_to_half_a_step_each(bits: tuple[int, int]) -> None:
    rows = normal(2, 2 ** bits[0], 3), 5 + normal(2, 2 ** bits[1], 3, seed=1)
    entries = sums(rows, bits)
    low, high, scale = as_integers(*rows, entries)
    whole = sums((low.float(), high.float()), bits)
    assert float(whole.abs().max()) <= 127
    assert bool(((whole * scale[:, None] - entries).abs() <= 1.0001 * scale[:, None]).all())


def test_training_is_the_same_every_time() -> None:
    x = normal(2, 600, 3)
    first, second = (train_additive(x, OVERLAPPING, [3, 2], 3, 0) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_near(a, b, 0.0)
