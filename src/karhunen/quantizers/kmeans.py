"""k-means for many small codebooks at once: the nearest of E entries, then the mean of what chose it.

    minimise Σ_n w_n min_e ‖x_n − entry_e‖²

Source: Lloyd (1982). Here: all codebooks of a layer run as one batch; an empty entry takes over half of the cluster
with the largest error; entries start at samples drawn by a seeded generator, so the same samples give the same tables.
They are spread by √((d + 2)/d), since the best points are as dense as p^{d/(d+2)} (Gersho, 1979), not as p.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.device import HOST
from karhunen.quantizers.nearest import nearest

COARSE_STRIDE = 4  # the first half of the iterations looks at every fourth sample,
COARSE_FROM = 32  # where there are at least this many samples for each entry


def kmeans(
    x: Float[Tensor, "s n w"], n_entries: int, n_iterations: int, seed: int, weight: Float[Tensor, "s n"] | None = None
) -> Float[Tensor, "s entries w"]:
    """Codebooks of `n_entries` for each of `s` sample sets; ValueError if there are fewer samples than entries."""
    s, n, w = x.shape
    if n < n_entries:
        raise ValueError(f"{n} calibration samples cannot train {n_entries} codebook entries; calibrate on more text")
    x = x.float()
    weight = x.new_ones(s, n) if weight is None else weight.float()
    sizes = (x.abs().amax(1) > 0).sum(-1).clamp_min(1).tolist()  # columns that are zero throughout are padding
    entries = _spread_samples(x, n_entries, seed, sizes)
    for iteration in range(n_iterations):
        stride = COARSE_STRIDE if iteration < n_iterations // 2 and n >= COARSE_FROM * n_entries else 1
        some, mine = x[:, ::stride], weight[:, ::stride]
        chosen, error = nearest(some, entries, sizes)
        mass = x.new_zeros(s, n_entries).scatter_add_(1, chosen, mine)
        where = chosen[..., None].expand(-1, -1, w)
        total = x.new_zeros(s, n_entries, w).scatter_add_(1, where, some * mine[..., None])
        entries = torch.where(mass[..., None] > 0, total / mass[..., None].clamp_min(1e-30), entries)
        _reseed_empty(entries, mass, chosen, error * mine)
    return entries


def _spread_samples(x: Float[Tensor, "s n w"], n_entries: int, seed: int, sizes: list[int]) -> Float[Tensor, "s e w"]:
    """Where entries start, in sets of `sizes` dimensions."""
    n = x.shape[1]
    start = torch.randperm(n, generator=torch.Generator(HOST).manual_seed(seed), device=HOST)
    size = torch.tensor(sizes, device=x.device)
    drawn = x[:, start[:n_entries].sort().values.to(x.device)]
    if (single := size == 1).any():
        drawn[single] = (
            x[single].sort(dim=1).values[:, ((torch.arange(n_entries, device=x.device) + 0.5) * n / n_entries).long()]
        )
    mean = x.mean(1, keepdim=True)
    return mean + (drawn - mean) * ((size + 2) / size).sqrt()[:, None, None]


def _reseed_empty(entries: Tensor, mass: Tensor, chosen: Tensor, error: Tensor) -> None:
    for book in (mass == 0).any(-1).nonzero().squeeze(-1).tolist():
        spent = error.new_zeros(entries.shape[1]).scatter_add_(0, chosen[book], error[book])
        worst = spent.sort(descending=True, stable=True).indices
        for empty, donor in zip((mass[book] == 0).nonzero().squeeze(-1).tolist(), worst.tolist(), strict=False):
            nudge = 1e-3 * entries[book, donor].abs().clamp_min(1e-6)
            entries[book, empty] = entries[book, donor] + nudge
            entries[book, donor] -= nudge
