"""Statistics without a model: keys and values of a known kind, measured for whatever a recipe asks."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame, join_heads
from karhunen.recipe import Recipe, Side
from karhunen.recipes import make
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need, Statistic
from karhunen.statistics.projection import Projection
from karhunen.statistics.rotary import Rotary
from karhunen.statistics.samples import Samples
from karhunen.windows.sink_recent import SinkRecent

SMALL = LayerShape("full", n_kv_heads=2, n_query_heads=4, key_dim=32, value_dim=32)
N_CALIBRATION = 300  # enough for 256 codebook entries
WINDOW = SinkRecent(sink=3, recent=20, page_tokens=8)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rotary(d: int, n_rotated: int | None = None, *, interleaved: bool = False, offset: int = 0) -> Rotary:
    n = d if n_rotated is None else n_rotated
    return Rotary((10000.0 ** -(torch.arange(0, n, 2, dtype=torch.float64) / n)).float(), interleaved, offset)


def vectors(b: int, h: int, t: int, d: int, seed: int = 0) -> Tensor:
    """Correlated over heads and coordinates, with a spectrum that falls by two decades, as keys have."""
    mix = torch.randn(h * d, h * d, generator=seeded(1)) * torch.logspace(0, -2, h * d)
    x = torch.randn(b, t, h * d, generator=seeded(seed)) @ mix
    return x.unflatten(-1, (h, d)).transpose(1, 2).contiguous()


def cached(shape: LayerShape, b: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys as a model caches them (rotated) and values."""
    keys = vectors(b, shape.n_kv_heads, t, shape.key_dim, seed)
    turned = rotary(shape.key_dim).rotate(keys, torch.arange(t).expand(b, t)[:, None]).float()
    return turned, vectors(b, shape.n_kv_heads, t, shape.value_dim, seed + 100)


def measure(need: Need, shape: LayerShape, key: Tensor, value: Tensor, turn: Rotary | None) -> Statistic:
    """The statistic of the given cached vectors `[1 h t d]`."""
    x = key if need.slot == "key" else value
    if need.kind == "projection":  # from hidden states as wide as the keys
        n_hidden, n_out = (y.shape[1] * y.shape[3] for y in (key, x))
        return Projection(torch.randn(n_hidden, n_out, generator=seeded(8)) / n_hidden**0.5, torch.ones(n_out))
    if need.kind == "activations":
        return Moments.of(join_heads(key)[0])
    frame = RopeFrame(need.block_tokens, need.joined)
    inside = frame.forward(x, torch.arange(x.shape[2])[None], turn if need.slot == "key" else None)[0]
    g, _, d = inside.shape
    if need.kind == "samples":
        return Samples.of(inside, need.stride)
    if need.kind in ("moments", "attended"):
        return Moments.of(inside)
    return Moments.of(torch.randn(g, 4 * d, d, generator=seeded(7)))  # queries, output weights


def statistics(recipe: Recipe, *shapes: LayerShape, turn: bool = True) -> Statistics:
    """Of a model with these layers; `turn=False`: a model that rotates nothing."""
    layers = {}
    for index, shape in enumerate(shapes):
        key, value = cached(shape, 1, N_CALIBRATION, seed=50 + index)
        turning = rotary(shape.key_dim) if turn else None
        measured = {need: measure(need, shape, key, value, turning) for need in sorted(recipe.needs(), key=repr)}
        layers[index] = LayerStatistics(turning, None, shape.key_dim**-0.5, N_CALIBRATION, measured)
    return Statistics(ModelIdentity("synthetic", "c", "w", shapes), layers, ("synthetic",))


def quick(recipe: Recipe) -> Recipe:
    """The recipe with a window that a hundred tokens leave, and short training; what codes nothing stays as it is."""
    if recipe.key is None or recipe.value is None:
        return recipe
    return replace(recipe, key=_untrained(recipe.key), value=_untrained(recipe.value), window=WINDOW)


def _untrained(side: Side) -> Side:
    if not hasattr(side.quantizer, "n_iterations"):
        return side
    return replace(side, quantizer=replace(side.quantizer, n_iterations=1))


@cache
def codec(name: str, shape: LayerShape = SMALL) -> Codec:
    """The fitted codec of a recipe by name, with the small window and short training."""
    recipe = quick(make(name))
    return fit(recipe, statistics(recipe, shape))
