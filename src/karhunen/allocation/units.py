"""Whole units (bytes) for head groups: one at a time, each where it lowers the distortion of the model most.

    D_h(u) = bound_h(u) · loss(u · unit / c),    the next unit goes to the largest D_h(u) − D_h(u + 1)

`bound` is the distortion of reverse water-filling over the head group's spectrum, `loss` how far above it the quantizer
lands at that rate. With a loss of 1 this is the model's water line, rounded.
Source: Fox (1966); Shoham & Gersho (1988), for convex D. Here: where the loss bends D the wrong way, its convex hull is
followed, several units at a time.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.device import HOST

FLOOR = 1e-30


def units_by_return(
    spectra: Sequence[Float[Tensor, " _"]],
    unit: int,
    n_units: int,
    most_bits: float,
    losses: Sequence[Sequence[tuple[float, float]]],
) -> Int[Tensor, " h"]:
    """Units of each head group; as near to `n_units` together as whole steps go, and never above it.

    `losses[h]` are knots (bits per coefficient, factor), between which the factor is linear; none means 1.
    """
    given = [0] * len(spectra)
    steps = [_steps(s, unit, most_bits, loss, n_units) for s, loss in zip(spectra, losses, strict=True)]
    queue = [(-path[0][1], h, 0) for h, path in enumerate(steps) if path]
    heapq.heapify(queue)
    left = n_units
    while queue and left:
        _, h, i = heapq.heappop(queue)
        n = min(steps[h][i][0], left)
        given[h] += n
        left -= n
        if i + 1 < len(steps[h]):
            heapq.heappush(queue, (-steps[h][i + 1][1], h, i + 1))
    return torch.tensor(given, device=HOST)


def distortion_bound(spectrum: Float[Tensor, " c"], unit: int, n_units: int) -> Float[Tensor, " u"]:
    """Distortion of reverse water-filling at 0 … n_units units of bits."""
    variance = np.sort(np.maximum(spectrum.double().cpu().numpy(), FLOOR))[::-1]
    n = np.arange(1, len(variance) + 1)
    sums = np.log2(variance).cumsum()
    tail = variance.sum() - variance.cumsum()
    bound = [float(variance.sum())]
    for u in range(1, n_units + 1):
        line = (sums - 2.0 * unit * u) / n  # the water line if the first n coefficients were above it
        k = int(np.nonzero(np.log2(variance) >= line)[0][-1])
        bound.append(float(n[k] * 2.0 ** line[k] + max(tail[k], 0.0)))
    return torch.tensor(bound, dtype=torch.float64, device=HOST)


def _steps(
    spectrum: Tensor, unit: int, most_bits: float, loss: Sequence[tuple[float, float]], n_units: int
) -> list[tuple[int, float]]:
    """(units, fall of distortion per unit) along the lower convex hull of a head group's distortion."""
    c = spectrum.numel()
    most = min(n_units, int(c * most_bits) // unit)
    distortion = distortion_bound(spectrum, unit, most).numpy()
    if loss:
        at, factor = zip(*loss, strict=True)
        distortion = distortion * np.interp(np.arange(most + 1) * unit / c, at, factor)
    hull = [0]
    for u in range(1, most + 1):
        while len(hull) > 1 and _slope(distortion, hull[-2], hull[-1]) >= _slope(distortion, hull[-2], u):
            hull.pop()
        hull.append(u)
    return [(b - a, -_slope(distortion, a, b)) for a, b in pairwise(hull)]


def _slope(distortion: np.ndarray, a: int, b: int) -> float:
    return float(distortion[b] - distortion[a]) / (b - a)
