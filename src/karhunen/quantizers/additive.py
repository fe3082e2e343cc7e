"""Training of tables whose entry is a sum of two look-ups: additive nibbles, and look-ups that overlap.

    entry(byte) = low[byte mod 2^a] + high[byte div 2^(8 − b)],    a + b ≥ 8;  (6, 6): four bits shared

Sixteen entries fit a register (the "fast scan" of product quantization: André et al., 2017). Training alternates the
nearest of the 256 sums with a least-squares solve for the rows (additive quantization: Babenko & Lempitsky, 2014).
Here: it starts from free entries, found by k-means and put in the order of a tree of principal axes, whose upper levels
are a byte's upper bits, so that entries which share a row are neighbours.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.quantizers.kmeans import kmeans
from karhunen.quantizers.nearest import nearest

RIDGE = 1e-3
"""Of a row's fair share of the samples: pulls a row that nothing names towards what it was, and lifts the normal
matrix to full rank."""
START_ROUNDS = 6
COARSE_STRIDE, COARSE_SHARE, COARSE_FROM = 4, 0.5, 32 * 256
"""The first share of the rounds looks at every fourth sample, where there are enough of them."""

Rows = tuple[Float[Tensor, "s low w"], Float[Tensor, "s high w"]]


def train_additive(
    x: Float[Tensor, "s n w"], index_bits: tuple[int, int], sizes: list[int], n_rounds: int, seed: int
) -> Rows:
    """(low, high) rows for each of `s` sample sets, of which the first `sizes[i]` columns count. ValueError if there
    are fewer samples than a table has entries."""
    x = x.float()
    chosen_rows = row_choice(index_bits, x.device)
    n = x.shape[1]
    rows = _first_rows(in_tree_order(kmeans(x, 256, START_ROUNDS, seed)), chosen_rows, index_bits)
    for k in range(n_rounds):
        some = x[:, ::COARSE_STRIDE] if n >= COARSE_FROM and k < COARSE_SHARE * n_rounds else x
        rows = _solved(some, nearest(some, sums(rows, index_bits), sizes)[0], rows, chosen_rows)
    return rows


def sums(rows: Rows, index_bits: tuple[int, int]) -> Float[Tensor, "s 256 w"]:
    """The entry of every byte."""
    a, b = index_bits
    byte = torch.arange(256, device=rows[0].device)
    return rows[0][:, byte % 2**a] + rows[1][:, byte // 2 ** (8 - b)]


def row_choice(index_bits: tuple[int, int], device: torch.device) -> Float[Tensor, "256 rows"]:
    """1 where a byte names a row, low rows first."""
    a, b = index_bits
    byte = torch.arange(256, device=device)
    choice = torch.zeros(256, 2**a + 2**b, dtype=torch.float64, device=device)
    choice[byte, byte % 2**a] = 1
    choice[byte, 2**a + byte // 2 ** (8 - b)] = 1
    return choice


def in_tree_order(entries: Float[Tensor, "s 256 w"]) -> Float[Tensor, "s 256 w"]:
    """Entries halved along their main axis, again and again: a byte's highest bit is the first cut."""
    w = entries.shape[-1]
    entries = entries.double()
    for level in range(8):
        nodes = entries.unflatten(1, (2**level, -1))
        centered = nodes - nodes.mean(2, keepdim=True)
        axis = torch.linalg.eigh(centered.mT @ centered).eigenvectors[..., -1:]
        axis = axis * axis.gather(-2, axis.abs().argmax(-2, keepdim=True)).sign()
        order = (centered @ axis).squeeze(-1).sort(dim=-1, stable=True).indices
        entries = nodes.gather(2, order[..., None].expand(-1, -1, -1, w)).flatten(1, 2)
    return entries.float()


def as_integers(
    low: Float[Tensor, "s a w"], high: Float[Tensor, "s b w"] | None, entries: Float[Tensor, "s 256 w"]
) -> tuple[Int[Tensor, "s a w"], Int[Tensor, "s b w"], Float[Tensor, "s w"]]:
    """(low, high, scale): int8 rows, of which every sum is int8 too; `entries` are the sums, `high` None where there
    is one look-up. What one side may lend the other is chosen so that neither is larger than it has to be."""
    if high is None:
        scale = (entries.abs().amax(1) / 127).clamp_min(1e-30)
        return (low / scale[:, None]).round().to(torch.int8), low[:, :0].to(torch.int8), scale
    middle = (low.amax(1, keepdim=True) + low.amin(1, keepdim=True)) / 2
    low, high = low - middle, high + middle
    peak = torch.stack([part.abs().amax(1) for part in (low, high, entries)]).amax(0)
    scale = (peak / 126).clamp_min(1e-30)  # two rounded halves may add up to one more
    return (low / scale[:, None]).round().to(torch.int8), (high / scale[:, None]).round().to(torch.int8), scale


def _first_rows(entries: Tensor, choice: Tensor, index_bits: tuple[int, int]) -> Rows:
    """The rows whose sums come nearest to free entries."""
    rows = torch.linalg.pinv(choice) @ entries.double()
    return rows[:, : 2 ** index_bits[0]].float(), rows[:, 2 ** index_bits[0] :].float()


def _solved(x: Float[Tensor, "s n w"], chosen: Int[Tensor, "s n"], rows: Rows, choice: Tensor) -> Rows:
    """The rows of least squared error for these choices: one normal matrix for all columns of a set."""
    s, n, w = x.shape
    count = x.new_zeros(s, 256).scatter_add_(1, chosen, x.new_ones(1).expand(s, n)).double()
    total = x.new_zeros(s, 256, w).scatter_add_(1, chosen[..., None].expand(-1, -1, w), x).double()
    pull = RIDGE * n / 16
    normal = choice.mT @ (count[..., None] * choice) + pull * torch.eye(
        choice.shape[1], dtype=torch.float64, device=choice.device
    )
    right = choice.mT @ total + pull * torch.cat(rows, dim=1).double()
    solved = torch.linalg.solve(normal, right).float()
    n_low = rows[0].shape[1]
    return solved[:, :n_low], solved[:, n_low:]
