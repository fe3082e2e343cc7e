"""What a recipe or a codec is made of: its choices by axis, where the bits go, what a token and the tables cost.

Bytes per token are measured: a few vectors are encoded and their bytes counted. Where a page coder (DEFLATE) makes them
smaller still, by how much depends on the data: what is given is before it, and says so. A cache's report has the rest.
"""

import inspect
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen import recipes
from karhunen.codec import Codec, Origin, SideCodec
from karhunen.device import HOST
from karhunen.quantizers.base import Codes, Quantizer
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.vector import VectorQuantizer
from karhunen.recipe import Side
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.need import SLOTS
from karhunen.values import dismantle
from karhunen.windows.base import Window
from karhunen.windows.refining import mean_share

AXES = ("frame", "metric", "transform", "allocation", "quantizer", "packing")
MEASURED_TOKENS = 64
REFERENCE_BYTES = 2  # a scalar of the uncompressed cache in bfloat16 or float16


@final
@dataclass(frozen=True)
class RecipeRow:
    """One recipe at its nominal options. Choices are by axis; the plainest ones are there too. `measured_bits` per
    element are those of `all` tokens of a context and of the `coded` ones alone (recipe_bits.json); empty if none."""

    name: str
    title: str
    source: str
    options: Mapping[str, Any]
    key: Mapping[str, str]
    value: Mapping[str, str]
    window: str
    needs_calibration: bool
    measured_bits: Mapping[str, float]


@final
@dataclass(frozen=True)
class SideAnatomy:
    """Keys or values of one layer. `bits` are those of the coefficients, by head group: least, mean, most, and how many
    coefficients get any (the rank kept). Code bytes are those before a page coder. Of the shared tables,
    `transform_bytes` are those of the transform (matrices, means) and `quantizer_bytes` those of the quantizer
    (codebooks, widths); a head group has an equal share."""

    layer: int
    slot: str
    axes: Mapping[str, str]
    n_coefficients: int
    bits: tuple["GroupBits", ...]
    code_bytes_per_token: float
    side_bytes_per_token: float
    table_bytes: int
    transform_bytes: int
    quantizer_bytes: int

    @property
    def n_elements(self) -> int:
        """Cached scalars per token."""
        return self.n_coefficients * len(self.bits)

    @property
    def bits_per_element(self) -> float:
        """Of a coded token, side information included."""
        return 8 * (self.code_bytes_per_token + self.side_bytes_per_token) / self.n_elements


@final
@dataclass(frozen=True)
class GroupBits:
    """Bits of the coefficients of one head group; `rank` of them get more than none."""

    least: float
    mean: float
    most: float
    rank: int


@final
@dataclass(frozen=True)
class Anatomy:
    """A whole codec."""

    model: ModelIdentity
    origin: Origin
    fingerprint: str
    window: str
    sides: tuple[SideAnatomy, ...]
    left_exact: Mapping[int, str]
    table_bytes: int

    @property
    def code_bytes_per_token(self) -> float:
        """Symbols of all coded layers."""
        return sum(side.code_bytes_per_token for side in self.sides)

    @property
    def side_bytes_per_token(self) -> float:
        """Gains and scales of all coded layers."""
        return sum(side.side_bytes_per_token for side in self.sides)

    @property
    def reference_bytes_per_token(self) -> int:
        """The same layers uncompressed, at two bytes a scalar."""
        return REFERENCE_BYTES * sum(side.n_elements for side in self.sides)

    @property
    def exact_bytes_per_token(self) -> int:
        """Full-attention layers that the codec leaves exact, at two bytes a scalar."""
        shapes = self.model.layers
        return REFERENCE_BYTES * sum(shapes[i].elements_per_token for i in self.left_exact if shapes[i].kind == "full")

    @property
    def bits_per_element(self) -> float:
        """Of coded tokens in coded layers; 0 if none is."""
        n = self.reference_bytes_per_token / REFERENCE_BYTES
        return 8 * (self.code_bytes_per_token + self.side_bytes_per_token) / n if n else 0.0

    @property
    def tokens_to_repay_tables(self) -> int | None:
        """Coded tokens after which coding has saved what the shared tables take, against two bytes a scalar."""
        saved = self.reference_bytes_per_token - self.code_bytes_per_token - self.side_bytes_per_token
        return math.ceil(self.table_bytes / saved) if saved > 0 else None


def recipe_rows() -> list[RecipeRow]:
    """Every recipe there is, found by folder; its source is what its file's first lines name."""
    return [_recipe_row(name) for name in recipes.names()]


@cache
def measured_bits() -> dict[str, Any]:
    """Of every recipe at its default options, on synthetic vectors: `bits`, and `what`, `n_tokens` and `provenance` of
    the measurement (benchmarks/recipe_bits.py)."""
    return json.loads(files("karhunen.evaluation.results").joinpath("recipe_bits.json").read_text(encoding="utf-8"))


def anatomy(codec: Codec) -> Anatomy:
    """Take a codec apart."""
    sides = tuple(
        _side(codec.model.layers[i], i, slot, layer.side(slot), codec.window)
        for i, layer in codec.layers.items()
        for slot in SLOTS
    )
    return Anatomy(
        codec.model,
        codec.origin,
        codec.fingerprint(),
        choice(codec.window),
        sides,
        codec.left_exact,
        codec.table_bytes(),
    )


def choice(value: Any) -> str:
    """A choice as one would write it: the fields that differ from their defaults; tables and functions left out."""
    if not is_dataclass(value) or isinstance(value, type):
        return _scalar(value)
    said: list[str] = []
    for field in fields(value):
        item = getattr(value, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if isinstance(item, Tensor) or (default is not MISSING and item == default):
            continue
        if isinstance(item, tuple) and len(item) > 4 and not is_dataclass(item[0]):
            continue
        if isinstance(item, tuple):
            said.append(", ".join(choice(part) for part in cast("tuple[Any, ...]", item)))
        else:
            said.append(choice(item) if is_dataclass(item) else f"{field.name}={_scalar(item)}")
    return type(value).__name__ + (f"({', '.join(said)})" if said else "")


def coefficient_bits(quantizer: Quantizer, g: int, c: int) -> Float[Tensor, "g c"]:
    """Bits of each coefficient; a symbol that covers several shares its bits among them."""
    bits = getattr(quantizer, "bits", None)
    if isinstance(bits, Tensor) and bits.shape == (g, c):
        return bits.double()
    if isinstance(quantizer, VectorQuantizer | ByteQuantizer):
        shared = torch.zeros(g, c, dtype=torch.float64, device=HOST)
        planes = quantizer.coordinates.to(HOST).long().split(quantizer.plane_size.tolist())
        for group, where, width in zip(quantizer.plane_group.tolist(), planes, quantizer.widths, strict=True):
            shared[group, where] += width / len(where)
        return shared
    return torch.full((g, c), sum(quantizer.widths) / (g * c), dtype=torch.float64, device=HOST)


def _recipe_row(name: str) -> RecipeRow:
    function = recipes.maker(name)
    lines = (inspect.getdoc(inspect.getmodule(function)) or "").splitlines()
    paper = re.search(r"arXiv:\d+\.\d+", " ".join(lines[:2]))
    named = next((line.removeprefix("Source:") for line in lines if line.startswith("Source:")), "")
    recipe = recipes.make(name)
    defaults = {key: p.default for key, p in inspect.signature(function).parameters.items()}
    return RecipeRow(
        name=name,
        title=(lines or [""])[0].rstrip("."),
        source=paper[0] if paper else re.split(r";|\.\s", named)[0].strip(" ."),
        options=defaults,
        key=_axes(recipe.key),
        value=_axes(recipe.value),
        window=choice(recipe.window),
        needs_calibration=bool(recipe.needs()),
        measured_bits=measured_bits()["bits"].get(name, {}),
    )


def _axes(side: Side | None) -> dict[str, str]:
    return {} if side is None else {axis: choice(getattr(side, axis)) for axis in AXES}


def _side(shape: LayerShape, layer: int, slot: str, codec: SideCodec, window: Window) -> SideAnatomy:
    n_tokens = math.lcm(codec.quantizer.granule_tokens, MEASURED_TOKENS)
    d = shape.key_dim if slot == "key" else shape.value_dim
    generator = torch.Generator(HOST).manual_seed(0)
    x = torch.randn(1, codec.n_heads, n_tokens, d, generator=generator, device=HOST).to(codec.device or HOST)
    positions = torch.arange(n_tokens, device=x.device)[None]
    packed = codec.encode(x, positions)
    g, c = codec.quantizer.decode(Codes(codec.layout.unpack(packed.planes), packed.side)).shape[1::2]
    axes = {
        "frame": choice(codec.frame),
        "transform": choice(codec.transform),
        "quantizer": choice(codec.quantizer),
        "packing": _packing(codec),
    }
    bits = coefficient_bits(codec.quantizer, g, c)
    return SideAnatomy(
        layer=layer,
        slot=slot,
        axes=axes,
        n_coefficients=c,
        bits=tuple(GroupBits(float(b.min()), float(b.mean()), float(b.max()), int((b > 0).sum())) for b in bits),
        code_bytes_per_token=packed.planes.nbytes / n_tokens * mean_share(window, codec.quantizer),
        side_bytes_per_token=sum(t.nbytes for t in packed.side.values()) / n_tokens,
        table_bytes=_bytes_of(codec),
        transform_bytes=_bytes_of(codec.transform),
        quantizer_bytes=_bytes_of(codec.quantizer),
    )


def _packing(codec: SideCodec) -> str:
    said = f"{type(codec.layout).__name__} of {codec.layout.bytes_per_token} bytes"
    return f"{said} before its page coder" if codec.layout.pages else said


def _bytes_of(part: Any) -> int:
    tensors: dict[str, Tensor] = {}
    dismantle(part, tensors)
    return sum(tensor.nbytes for tensor in tensors.values())


def _scalar(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
