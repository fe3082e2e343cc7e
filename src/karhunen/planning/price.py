"""What a recipe costs in a layer of given sizes, from bytes that exist: a codec is fitted to drawn vectors.

recipe + CacheLayer ──▶ made-up statistics ──▶ fit ──▶ encode ──▶ bits of a coded number, tables, window

Where one budget is split over the whole model, that budget is the rate (the model meets it, whatever a layer gets).
No model is run. Where heads stand alone a few of them say what all cost; where they are joined, tables of transforms
grow with the square of the heads, and all else with the heads.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from karhunen.allocation.water_filling import WaterFilling
from karhunen.codec import SideCodec
from karhunen.device import HOST
from karhunen.fitting import fit
from karhunen.planning.made_up import made_up_statistics
from karhunen.planning.rate import Rate, Split, Tables
from karhunen.planning.shape import CacheLayer, ModelShape
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.embedded import Embedded
from karhunen.quantizers.gains import GAIN_BITS
from karhunen.quantizers.vector import VectorQuantizer
from karhunen.recipe import Recipe, Side
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.need import SLOTS
from karhunen.values import dismantle
from karhunen.windows.base import Window
from karhunen.windows.partition import Place
from karhunen.windows.refining import Refining
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.streaming import Streaming
from karhunen.windows.top_scored import TopScored

MOST_ELEMENTS = 512  # of a side that is fitted; wider layers are priced by some of their heads
ENCODED_TOKENS = 64
TEXT_DECIDES = "tokens of small norm that the recipe keeps exact as well, as many as the text has"
DEFLATED = "pages are deflated: the bits are those before, real text takes less"


def price(name: str, recipe: Recipe, shape: ModelShape) -> Rate:
    """The rate of a recipe for a model's layers; ValueError where it cannot code them, naming the layer's sizes."""
    layers = tuple(dict.fromkeys(shape.codable))
    if recipe.key is None:
        return Rate(name, dict.fromkeys(layers), split_of(recipe.window, 1), said_window(recipe.window))
    n_elements = sum(layer.elements_per_token for layer in shape.codable)
    found = {layer: _layer(name, recipe, layer, n_elements) for layer in layers}
    granule = math.lcm(1, *(g for *_, g, _ in found.values()))
    notes = [DEFLATED] if any(deflated for *_, deflated in found.values()) else []
    if recipe.window.exceptions is not None and not recipe.window.exceptions.steady:
        notes.append(TEXT_DECIDES)
    return Rate(
        name=name,
        bits={layer: bits for layer, (bits, *_) in found.items()},
        split=split_of(recipe.window, granule),
        window=said_window(recipe.window),
        granule_tokens=granule,
        tables={layer: tables for layer, (_, tables, *_) in found.items()},
        calibrated=bool(recipe.needs()),
        notes=tuple(notes),
    )


def split_of(window: Window, granule: int) -> Split:
    """Exact and coded tokens of a text, by the window's own partition."""

    def split(n_tokens: int) -> tuple[int, int]:
        n_held = n_tokens
        if isinstance(window, TopScored):
            n_held -= window.n_dropped_of(max(0, n_tokens - window.sink), n_tokens)
        places = window.partition(n_held, granule)
        return places.count(Place.EXACT), places.count(Place.CODED)

    return split


def said_window(window: Window) -> str:
    """What it keeps exact, in words."""
    if isinstance(window, TopScored):
        return "tokens are dropped by score, head by head"
    if isinstance(window, Refining):
        return f"{said_window(window.window)}; of the others those that are looked at have more bytes"
    if not isinstance(window, SinkRecent | Streaming):
        return "every token exact"
    newest = f"{window.recent} to {window.recent + window.page_tokens - 1}"
    said = f"{window.sink} first and {newest} newest tokens exact"
    return f"{said}, others dropped" if window.drops else said


def side_bytes(codec: SideCodec, dim: int) -> float:
    """Bytes of a coded token: codes by their layout, side information of tokens that are encoded. `dim` is a head's
    size. Vector quantizers have a gain at most, which their kind says."""
    quantizer = codec.quantizer
    if isinstance(quantizer, ByteQuantizer | VectorQuantizer):
        return codec.layout.bytes_per_token + quantizer.g * GAIN_BITS[quantizer.gain] / 8
    n_tokens = math.lcm(codec.granule_tokens, ENCODED_TOKENS)
    x = torch.randn(1, codec.n_heads, n_tokens, dim, generator=torch.Generator(HOST).manual_seed(1), device=HOST)
    packed = codec.encode(x, torch.arange(n_tokens, device=HOST)[None])
    return sum(tensor.nbytes for tensor in packed.tensors()) / n_tokens


def table_bytes(codec: SideCodec) -> tuple[int, int]:
    """Bytes of the transform, and of all other tables but the rotation's frequencies, which heads share."""
    transform, every, shared = (_bytes_of(part) for part in (codec.transform, codec, codec.rotary))
    return transform, every - transform - shared


def _layer(name: str, recipe: Recipe, layer: CacheLayer, n_elements: int) -> tuple[float, Tables, int, bool]:
    """Bits of a coded number, tables, granule, and whether pages are deflated."""
    n_kv = _fitted_heads(layer)
    shape = LayerShape("full", n_kv, n_kv, layer.key_dim, layer.value_dim)
    assert recipe.key is not None and recipe.value is not None, "recipes without sides code nothing"
    quick = replace(recipe, key=_untrained(recipe.key), value=_untrained(recipe.value))
    try:
        codec = fit(quick, made_up_statistics(quick, shape)).layers[0]
    except ValueError as error:
        sizes = f"{layer.n_kv_heads} heads of {layer.key_dim} and {layer.value_dim} numbers"
        raise ValueError(f"{name} does not code layers of {sizes}: {error}") from error
    dims = {"key": layer.key_dim, "value": layer.value_dim}
    n_bytes = sum(side_bytes(codec.side(slot), dims[slot]) for slot in SLOTS)
    more = layer.n_kv_heads / n_kv
    transforms = codebooks = 0.0
    for slot in SLOTS:
        side: Any = recipe.side(slot)
        of_transform, others = table_bytes(codec.side(slot))
        transforms += of_transform * (more**2 if side.frame.joined else more)
        codebooks += others * more + _bytes_of(codec.side(slot).rotary)
    joined = recipe.key.frame.joined and recipe.value.frame.joined
    tables = Tables(round(transforms), round(codebooks), 1 if joined else layer.n_kv_heads)
    bits = _budget(recipe, n_elements) or 8 * n_bytes / shape.elements_per_token
    return bits, tables, codec.granule_tokens, codec.is_paged


def _budget(recipe: Recipe, n_elements: int) -> float:
    """Bits of a coded number where one budget over the whole model says them, `n_elements` cached numbers of a token;
    0 where each layer's sizes do."""
    found: list[float] = []
    for slot in SLOTS:
        side = recipe.side(slot)
        if side is None or not isinstance(side.allocation, WaterFilling) or side.allocation.scope != "model":
            return 0.0
        stated = side.allocation.token_bytes
        found.append(side.allocation.bits if stated is None else 8 * stated / n_elements)
    window = recipe.window
    refined = window.mean_layers * window.layer_bits if isinstance(window, Refining) else 0.0
    return sum(found) / len(found) + refined


def _fitted_heads(layer: CacheLayer) -> int:
    """As many heads as fit, in whole parts of all of them."""
    widest = max(layer.key_dim, layer.value_dim)
    parts = [n for n in range(1, layer.n_kv_heads + 1) if layer.n_kv_heads % n == 0 and n * widest <= MOST_ELEMENTS]
    return max(parts, default=1)


def _untrained(side: Side) -> Side:
    """Codebooks as they start: of the same bytes."""
    quantizer: Any = side.quantizer
    if isinstance(quantizer, Embedded):
        return replace(side, quantizer=replace(quantizer, inner=replace(quantizer.inner, n_iterations=0)))
    return replace(side, quantizer=replace(quantizer, n_iterations=0)) if hasattr(quantizer, "n_iterations") else side


def _bytes_of(*parts: Any) -> int:
    tensors: dict[str, Tensor] = {}
    dismantle(list(parts), tensors)
    return sum(tensor.nbytes for tensor in tensors.values())


def prices(named: Sequence[tuple[str, Recipe]], shape: ModelShape) -> list[Rate]:
    """`price` of several recipes, in order."""
    return [price(name, recipe, shape) for name, recipe in named]
