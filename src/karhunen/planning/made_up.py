"""Statistics of a layer that nobody has measured: drawn vectors with a spectrum that falls by a decade.

A codec fitted to them has the bytes that one of a real layer of this shape has: lengths follow from the recipe and the
sizes, not from the numbers. What depends on numbers (deflated pages, tokens exact by their norm) is said by the price.
"""

import torch
from torch import Tensor

from karhunen.device import HOST
from karhunen.recipe import Recipe
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need, Statistic
from karhunen.statistics.projection import Projection
from karhunen.statistics.rotary import Rotary
from karhunen.statistics.samples import Samples

N_VECTORS = 256  # as many as the entries of a byte's table, on whose number no byte depends


def made_up_statistics(recipe: Recipe, shape: LayerShape) -> Statistics:
    """All that `recipe` needs, of a model that is this one layer."""
    generator = torch.Generator(HOST).manual_seed(0)
    frequencies = 10000.0 ** -(torch.arange(0, shape.key_dim, 2, dtype=torch.float64, device=HOST) / shape.key_dim)
    measured = {need: _statistic(need, shape, generator) for need in sorted(recipe.needs(), key=str)}
    layer = LayerStatistics(Rotary(frequencies.float(), False), None, shape.key_dim**-0.5, N_VECTORS, measured)
    return Statistics(ModelIdentity("made up", "", "", (shape,)), {0: layer}, ("made up",))


def _statistic(need: Need, shape: LayerShape, generator: torch.Generator) -> Statistic:
    width = shape.key_dim if need.slot == "key" else shape.value_dim
    g, d = (1, shape.n_kv_heads * width) if need.joined else (shape.n_kv_heads, width)
    if need.kind == "projection":
        n_out = shape.n_kv_heads * width
        return Projection(_drawn(generator, n_out, n_out), torch.zeros(n_out, device=HOST))
    if need.kind == "activations":
        g, d = 1, shape.n_kv_heads * shape.key_dim
    vectors = _drawn(generator, g, max(N_VECTORS, 2 * d), d)
    return Samples.of(vectors[:, :N_VECTORS]) if need.kind == "samples" else Moments.of(vectors)


def _drawn(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=generator, device=HOST) * torch.logspace(0, -1, sizes[-1], device=HOST)
