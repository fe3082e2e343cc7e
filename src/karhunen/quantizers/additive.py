"""Tables of additive nibbles: a byte is two nibbles, its entry the sum of what each names.

    entry(byte) = (low[byte mod 16] + high[byte div 16]) · scale,    low, high: int8, one scale for each column

Sixteen entries fit a register, so such bytes can be scanned: a look-up is one instruction for 16 to 64 tokens, and a
table is folded with a query for an eighth of the work (the "fast scan" of product quantization: André et al., 2017).
Training alternates the nearest of the 256 sums with a least-squares solve for the 32 rows (additive quantization:
Babenko & Lempitsky, 2014). Here: the better of two starts for each byte: k-means and k-means of what it leaves
(a residual), or each nibble its own coordinates (a product); integers with one scale a column are the definition.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.quantizers.nearest import nearest

NIBBLES = 16
TOP = 127
"""Largest size of an integer entry and of every sum of two."""
RIDGE = 1e-3
"""Of a row's fair share of the samples: pulls a row that nothing names towards what it was, and lifts the normal
matrix from rank 31."""
START_STRIDE, START_ITERATIONS = 4, 8
COARSE_STRIDE, COARSE_SHARE = 4, 0.6
"""The first share of the rounds looks at every fourth sample, where there are enough of them."""
COARSE_FROM = 32 * 256

Rows = tuple[Float[Tensor, "s 16 w"], Float[Tensor, "s 16 w"]]


def train_additive(x: Float[Tensor, "s n w"], sizes: Sequence[int], n_rounds: int, seed: int) -> tuple[Rows, Tensor]:
    """(low, high) rows for each of `s` sample sets, of which the first `sizes[i]` columns count, and their mean
    squared error, float32. ValueError if there are fewer samples than a table has entries."""
    n = x.shape[1]
    if n < NIBBLES**2:
        raise ValueError(f"{n} calibration samples cannot train {NIBBLES**2} codebook entries; calibrate on more text")
    x = x.float()
    widths = list(sizes)
    found: list[tuple[Rows, Tensor]] = []
    for start in (_residual_start, _product_start):
        rows = start(x[:, ::START_STRIDE] if n >= COARSE_FROM else x, widths, seed)
        for k in range(n_rounds):
            some = x[:, ::COARSE_STRIDE] if n >= COARSE_FROM and k < COARSE_SHARE * n_rounds else x
            rows = _solved(some, nearest(some, sums(*rows), widths)[0], rows)
        found.append((rows, nearest(x, sums(*rows), widths)[1].mean(1)))
    (first, error), (second, other) = found
    better = (error <= other)[:, None, None]
    low, high = (torch.where(better, a, b) for a, b in zip(first, second, strict=True))
    return (low, high), torch.minimum(error, other)


def sums(low: Float[Tensor, "s 16 w"], high: Float[Tensor, "s 16 w"]) -> Float[Tensor, "s 256 w"]:
    """The entry of every byte."""
    return (high[:, :, None] + low[:, None]).flatten(1, 2)


def as_integers(rows: Rows) -> tuple[Int[Tensor, "s 16 w"], Int[Tensor, "s 16 w"], Float[Tensor, "s w"]]:
    """(low, high, scale): int8 rows whose sums are int8 too. What one side may lend the other is chosen so that
    neither is larger than it has to be."""
    low, high = rows
    middle = (low.amax(1, keepdim=True) + low.amin(1, keepdim=True)) / 2
    low, high = low - middle, high + middle
    peak = torch.stack([part.abs().amax(1) for part in (low, high, sums(low, high))]).amax(0)
    scale = (peak / (TOP - 1)).clamp_min(1e-30)
    return (
        (low / scale[:, None]).round().to(torch.int8),
        (high / scale[:, None]).round().to(torch.int8),
        scale,
    )


def _solved(x: Float[Tensor, "s n w"], chosen: Int[Tensor, "s n"], rows: Rows) -> Rows:
    """The rows of least squared error for these choices: 32 unknowns for each column, one normal matrix."""
    s, n, w = x.shape
    count = torch.zeros(s, NIBBLES**2).scatter_add_(1, chosen, torch.ones(1).expand(s, n))
    count = count.unflatten(1, (NIBBLES, NIBBLES)).double()  # [s high low]
    total = torch.zeros(s, NIBBLES**2, w).scatter_add_(1, chosen[..., None].expand(-1, -1, w), x)
    total = total.unflatten(1, (NIBBLES, NIBBLES)).double()
    normal = torch.cat(
        [
            torch.cat([torch.diag_embed(count.sum(1)), count.mT], dim=2),
            torch.cat([count, torch.diag_embed(count.sum(2))], dim=2),
        ],
        dim=1,
    )
    pull = RIDGE * n / NIBBLES
    before = torch.cat(rows, dim=1).double()
    right = torch.cat([total.sum(1), total.sum(2)], dim=1) + pull * before
    solved = torch.linalg.solve(normal + pull * torch.eye(2 * NIBBLES, dtype=torch.float64), right).float()
    return solved[:, :NIBBLES], solved[:, NIBBLES:]


def _residual_start(x: Float[Tensor, "s n w"], sizes: list[int], seed: int) -> Rows:
    low = _lloyd(x, seed)
    left = x - low.gather(1, _nearest_row(x, low)[..., None].expand(-1, -1, x.shape[-1]))
    return low, _lloyd(left, seed + 1)


def _product_start(x: Float[Tensor, "s n w"], sizes: list[int], seed: int) -> Rows:
    """The coordinates of each set in two halves of nearly equal volume, one for each nibble."""
    size = torch.tensor(sizes)
    level = x.square().mean(1).clamp_min(1e-30).log()
    masks = torch.zeros(2, *level.shape)
    for i in range(len(x)):
        order = level[i, : size[i]].argsort(descending=True, stable=True).tolist()
        fill = [0.0, 0.0]
        for column in order:
            side = fill.index(min(fill))
            masks[side, i, column] = 1.0
            fill[side] += float(level[i, column] - level[i, order[-1]]) + 1e-3
    single = (size == 1)[:, None, None]
    halves = [_lloyd(x * mask[:, None], seed + side) for side, mask in enumerate(masks)]
    if not bool(single.any()):
        return halves[0], halves[1]
    residual = _residual_start(x, sizes, seed)
    return torch.where(single, residual[0], halves[0]), torch.where(single, residual[1], halves[1])


def _lloyd(x: Float[Tensor, "s n w"], seed: int) -> Float[Tensor, "s 16 w"]:
    """A few rounds of k-means with 16 entries: a place to start from."""
    s, n, w = x.shape
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:NIBBLES].sort().values
    rows = x[:, drawn]
    for _ in range(START_ITERATIONS):
        chosen = _nearest_row(x, rows)
        mass = torch.zeros(s, NIBBLES).scatter_add_(1, chosen, torch.ones(1).expand(s, n))[..., None]
        total = torch.zeros(s, NIBBLES, w).scatter_add_(1, chosen[..., None].expand(-1, -1, w), x)
        rows = torch.where(mass > 0, total / mass.clamp_min(1), rows)
    return rows


def _nearest_row(x: Float[Tensor, "s n w"], rows: Float[Tensor, "s e w"]) -> Int[Tensor, "s n"]:
    return torch.baddbmm(rows.square().sum(-1)[:, None] / 2, x, rows.mT, alpha=-1).argmin(-1)


Start = Callable[[Float[Tensor, "s n w"], list[int], int], Rows]
