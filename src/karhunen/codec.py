"""The fitted artifact: for each coded layer, how its keys and values become bytes and come back.

x ── frame ──▶ κ ── transform ──▶ y ── quantizer ──▶ symbols ── packing ──▶ bytes
x ◀── frame ── κ ◀── transform ── y ◀── quantizer ── symbols ◀── packing ── bytes
"""

import logging
import math
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from karhunen.card import ReportCard
from karhunen.device import HOST, computes_float64, device_of, moved
from karhunen.folder import named_folder, read_folder, write_folder
from karhunen.frames.rope_frame import RopeFrame
from karhunen.kernels.paths import forced
from karhunen.packing.base import Layout
from karhunen.quantizers.base import Codes, Quantizer
from karhunen.statistics.identity import ModelIdentity
from karhunen.statistics.need import SLOTS, Slot
from karhunen.statistics.rotary import Rotary
from karhunen.transforms.base import Transform
from karhunen.values import assemble, dismantle, fingerprint, kinds_in
from karhunen.windows.base import Window
from karhunen.windows.left_out import without
from karhunen.windows.refining import check_layers, mean_share
from karhunen.windows.small_norm import NormBelow

FORMAT, VERSION = "karhunen-codec", 2
READ = (1, VERSION)
"""Versions that are read: 1 differs in what its byte codes are (`VectorQuantizer`, no `ByteQuantizer`)."""
PART_PACKAGES = (
    "karhunen.statistics",
    "karhunen.frames",
    "karhunen.transforms",
    "karhunen.quantizers",
    "karhunen.packing",
    "karhunen.windows",
    "karhunen.card",
    "karhunen.codec",
)

MOST_GRANULE_TOKENS = 1 << 14  # a token may wait for as many others
MOST_IN_TABLE = 1e15  # two of them multiplied, a gain and a sum over a vector stay numbers in float32

NOT_FINITE = "NaN or infinity among the vectors to be coded; the model's own forward produced it"

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Packed:
    """Coded tokens of one side: byte planes, and side tensors whose last axis is time (or whole blocks of it)."""

    planes: UInt8[Tensor, "b p t"]
    side: Mapping[str, Tensor]

    def tensors(self) -> list[Tensor]:
        """Everything that takes memory."""
        return [self.planes, *self.side.values()]

    def to(self, device: torch.device) -> "Packed":
        """The same on a device."""
        return moved(self, device)


@final
@dataclass(frozen=True)
class SideCodec:
    """Keys or values of one layer: `encode` and its mirror `decode`. `mean` is that of a centered frame."""

    n_heads: int
    frame: RopeFrame
    rotary: Rotary | None
    mean: Float[Tensor, "h d"] | None
    transform: Transform
    quantizer: Quantizer
    layout: Layout

    def encode(
        self,
        x: Float[Tensor, "b h t d"],
        positions: Int[Tensor, "b t"],
        left_out: Bool[Tensor, "b t"] | None = None,
    ) -> Packed:
        """Vectors to bytes. `t` must be a multiple of the granule; ValueError on NaN or infinity.

        Tokens of `left_out` are kept elsewhere: they stretch no range that others share.
        """
        if not is_finite(x):
            raise ValueError(NOT_FINITE)
        return self.encode_finite(x, positions, left_out)

    def encode_finite(
        self,
        x: Float[Tensor, "b h t d"],
        positions: Int[Tensor, "b t"],
        left_out: Bool[Tensor, "b t"] | None = None,
    ) -> Packed:
        """As `encode`, of vectors known to be finite: asks the device nothing where the symbols are bytes."""
        if (away := self._away(x.device)) is not None:
            hidden = None if left_out is None else left_out.to(away)
            return self.encode_finite(x.to(away), positions.to(away), hidden).to(x.device)
        with as_written(x.device):
            y = self.transform.forward(self.frame.forward(x.detach(), positions, self.rotary, self.mean))
            if left_out is not None:
                y = without(y, left_out, self.quantizer.granule_tokens)
            codes = self.quantizer.encode(y)
            return Packed(self.layout.pack(codes.symbols), codes.side)

    @property
    def granule_tokens(self) -> int:
        """Whole blocks of the quantizer, and whole pages of the layout."""
        pages = self.layout.pages
        return math.lcm(self.quantizer.granule_tokens, pages.page_tokens if pages else 1)

    def decode(self, packed: Packed, positions: Int[Tensor, "b t"]) -> Float[Tensor, "b h t d"]:
        """Bytes to vectors, float32 or float64 as the frame leaves them."""
        device = packed.planes.device
        if (away := self._away(device)) is not None:
            made = self.decode(packed.to(away), positions.to(away))
            return made.float().to(device)  # a device without float64 is the reason why they were away
        with as_written(packed.planes.device):
            codes = Codes(self.layout.unpack(packed.planes), packed.side)
            y = self.quantizer.decode(codes)
            return self.frame.inverse(self.transform.inverse(y), positions, self.rotary, self.n_heads, self.mean)

    def distort(self, x: Float[Tensor, "b h t d"], positions: Int[Tensor, "b t"]) -> Float[Tensor, "b h t d"]:
        """`decode(encode(x))`: what attention will see in place of x."""
        return self.decode(self.encode(x, positions), positions)

    def check(self, n_heads: int, dim: int) -> None:
        """ValueError, saying what is wrong, unless it codes vectors of `n_heads` heads of `dim`: parts fit each other,
        tables are finite, and a token goes to bytes and comes back. Looks at plain torch only: no address is taken."""
        if self.n_heads != n_heads:
            raise ValueError(f"it codes {self.n_heads} heads, and the layer has {n_heads}")
        if self.rotary is not None and not 0 <= self.rotary.offset <= dim - self.rotary.n_rotated:
            raise ValueError(f"its rotation of {self.rotary.n_rotated} coordinates does not fit vectors of {dim}")
        mean = self.mean
        if self.frame.center != (mean is not None) or (mean is not None and mean.shape != (n_heads, dim)):
            raise ValueError("its mean is not the one of its frame")
        tensors: dict[str, Tensor] = {}
        dismantle(self, tensors)
        for name, x in tensors.items():
            if not x.is_floating_point() or not x.numel():
                continue
            largest = float(x.double().abs().max())
            if not math.isfinite(largest):
                raise ValueError(f"its {name} holds NaN or infinity")
            if largest > MOST_IN_TABLE:
                raise ValueError(f"its {name} holds {largest:.2g}; numbers of a table are {MOST_IN_TABLE:g} at most")
        g, d = (1, n_heads * dim) if self.frame.joined else (n_heads, dim)
        self.quantizer.check(g, self.transform.n_coefficients(g, d))
        self.layout.check(self.quantizer.widths)
        if not 1 <= self.granule_tokens <= MOST_GRANULE_TOKENS:
            raise ValueError(f"it codes {self.granule_tokens} tokens at a time; use 1 to {MOST_GRANULE_TOKENS}")
        self._try(n_heads, dim)

    def _try(self, n_heads: int, dim: int) -> None:
        shape, positions = (1, n_heads, self.granule_tokens, dim), torch.arange(self.granule_tokens, device=HOST)[None]
        x = torch.linspace(-1, 1, math.prod(shape), device=HOST).view(shape)
        try:
            with forced("naive"):
                packed = self.encode(x, positions)
                largest = replace(packed, planes=torch.full_like(packed.planes, 255))
                made, _ = self.decode(packed, positions), self.decode(largest, positions)
        except (
            RuntimeError,
            TypeError,
            IndexError,
            KeyError,
            AssertionError,
            ZeroDivisionError,
            OverflowError,
        ) as error:
            raise ValueError(f"a token cannot be coded ({type(error).__name__}: {error})".splitlines()[0]) from error
        if made.shape != x.shape or packed.planes.shape[1:] != (self.layout.bytes_per_token, self.granule_tokens):
            raise ValueError(f"a token of {shape} comes back as {tuple(made.shape)}")
        if not is_finite(made):
            raise ValueError("a token comes back as NaN or infinity")

    @cached_property
    def device(self) -> torch.device | None:
        """Where the tables lie; None where there are none."""
        return device_of(self)

    def _away(self, device: torch.device) -> torch.device | None:
        """The host, where vectors of a device without float64 are coded; None where they are coded on the spot.
        ValueError if the tables lie on another device."""
        if not computes_float64(device):
            return HOST
        if self.device is not None and self.device != device:
            raise ValueError(
                f"the vectors lie on {device}, the codec's tables on {self.device}; use codec.to({device})"
            )
        return None


@final
@dataclass(frozen=True)
class LayerCodec:
    """Both sides of one layer. A fitted value: copies of a cache share it."""

    key: SideCodec
    value: SideCodec
    exceptions: NormBelow | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "LayerCodec":
        return self

    def side(self, slot: Slot) -> SideCodec:
        """The side of the keys or that of the values."""
        return self.key if slot == "key" else self.value

    def exchanged(self) -> "LayerCodec":
        """With keys for values and values for keys."""
        return LayerCodec(self.value, self.key, self.exceptions and self.exceptions.exchanged())

    @property
    def is_paged(self) -> bool:
        """Whether a side's bytes are stored as pages of varying length, which are read whole."""
        return any(self.side(slot).layout.pages is not None for slot in SLOTS)

    def to(self, device: torch.device) -> "LayerCodec":
        """The same with its tables on `device`, or on the host where that device has no float64. Made once for each
        device: whoever asks again, through this value or that one, gets the one value."""
        where = device if computes_float64(device) else HOST
        if where not in self._placed:
            made = moved(self, where)
            made.__dict__["_placed"] = self._placed
            self._placed[where] = made
        return self._placed[where]

    @cached_property
    def _placed(self) -> dict[torch.device, "LayerCodec"]:
        return {}

    @cached_property
    def prepared(self) -> dict[Hashable, Any]:
        """What a reader made of this codec, by reader: filled at first use, never stored."""
        return {}

    @cached_property
    def granule_tokens(self) -> int:
        """Tokens are coded in multiples of this."""
        return math.lcm(self.key.granule_tokens, self.value.granule_tokens)


@final
@dataclass(frozen=True)
class Origin:
    """Where a codec comes from: recipe name and fingerprint, calibration text and its length, versions; and what was
    noted while it was fitted, such as heads where an error costs nothing."""

    recipe: str = ""
    recipe_fingerprint: str = ""
    calibration: tuple[str, ...] = ()
    n_tokens: int = 0
    versions: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Codec:
    """The codec of a model: one `LayerCodec` for each coded layer, and why each other layer is left exact. `card` is
    what `karhunen verify` measured of it, None before."""

    model: ModelIdentity
    window: Window
    layers: Mapping[int, LayerCodec]
    left_exact: Mapping[int, str]
    origin: Origin = Origin()
    card: ReportCard | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "Codec":
        return self

    @property
    def windowed(self) -> tuple[int, ...]:
        """Layers that hold other tokens than they were given: the coded ones, and all whose tokens may be dropped."""
        dropping = [i for i, shape in enumerate(self.model.layers) if shape.kind == "full" and self.window.drops]
        return tuple(sorted({*self.layers, *dropping}))

    def table_bytes(self) -> int:
        """Bytes of the shared tables: transforms, codebooks, widths; independent of the number of tokens."""
        tensors: dict[str, Tensor] = {}
        dismantle(self.layers, tensors)
        return sum(tensor.nbytes for tensor in tensors.values())

    def check(self) -> None:
        """ValueError, naming layer and side, unless every part is what the others and the model's layers imply."""
        shapes = self.model.layers
        coded, exact = set(self.layers), set(self.left_exact)
        if coded & exact or coded | exact != set(range(len(shapes))):
            raise ValueError(f"layers {sorted(coded)} are coded and {sorted(exact)} exact, of {len(shapes)}")
        for index, layer in self.layers.items():
            shape = shapes[index]
            if shape.kind != "full" or min(shape.n_kv_heads, shape.key_dim, shape.value_dim) < 1:
                raise ValueError(f"layer {index} is coded, and is {shape}")
            if (layer.exceptions is None) != (self.window.exceptions is None):
                raise ValueError(f"layer {index}: its rule for exact tokens is not the window's")
            try:
                check_layers(self.window, {slot: layer.side(slot).quantizer for slot in SLOTS})
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from error
            for slot, dim in zip(SLOTS, (shape.key_dim, shape.value_dim), strict=True):
                try:
                    layer.side(slot).check(shape.n_kv_heads, dim)
                except ValueError as error:
                    raise ValueError(f"layer {index}, {slot}s: {error}") from error

    def check_model(self, model: ModelIdentity) -> None:
        """ValueError with the reason if this codec was made for another model."""
        if reason := self.model.mismatch(model):
            raise ValueError(f"this codec does not fit the model: {reason}")

    def to(self, device: torch.device | str) -> "Codec":
        """The same with its tables on one device. A cache does so by itself, layer by layer, for the device where the
        layer's keys lie: of use where a codec is called without one."""
        return replace(self, layers={i: layer.to(torch.device(device)) for i, layer in self.layers.items()})

    def fingerprint(self) -> str:
        """Sixteen hex digits over everything that decides the bytes: tables, layouts, window."""
        return fingerprint((self.layers, self.window))

    @property
    def description(self) -> str:
        """For people: recipe, bits of the codes, what it was calibrated on, when it was verified, fingerprint."""
        said = [self.origin.recipe or "an unnamed recipe"]
        n = sum(self.model.layers[index].elements_per_token for index in self.layers)
        if n:
            sides = [layer.side(slot) for layer in self.layers.values() for slot in SLOTS]
            size = sum(side.layout.bytes_per_token * mean_share(self.window, side.quantizer) for side in sides)
            said.append(f"codes of {8 * size / n:.2f} bits")
        if self.origin.n_tokens:
            said.append(f"{self.origin.n_tokens:,} calibration tokens")
        if self.card is not None and self.card.made.get("date"):
            said.append(f"verified {self.card.made['date']}")
        return ", ".join((*said, self.fingerprint()))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the artifact: `config.json` and `tensors.safetensors`, whole or not at all. ValueError if its report
        card is another codec's."""
        if self.card is not None and self.card.codec != (mine := self.fingerprint()):
            raise ValueError(f"the report card is that of codec {self.card.codec}, this is {mine}; verify it anew")
        tensors: dict[str, Tensor] = {}
        write_folder(named_folder(folder), FORMAT, VERSION, {"codec": dismantle(self, tensors)}, tensors)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Codec":
        """Read an artifact, and log its report card; ValueError saying what is wrong with it."""
        config, tensors = read_folder(named_folder(folder), FORMAT, *READ)
        made = _assembled(Path(folder), config.get("codec"), tensors)
        if not isinstance(made, cls):
            raise ValueError(f"{folder} holds a {type(made).__name__}, not a codec")
        try:
            made.check()
        except ValueError as error:
            raise ValueError(f"{folder} holds no codec that can be used: {error}; make it again") from error
        if made.card is not None:
            level = logging.INFO if made.card.passed else logging.WARNING
            _LOG.log(level, "%s: %s; all: `karhunen inspect %s`", folder, made.card.line, folder)
        return made


def _assembled(folder: Path, data: Any, tensors: Mapping[str, Tensor]) -> Any:
    try:
        return assemble(data, kinds_in(*PART_PACKAGES), tensors)
    except ValueError as error:
        raise ValueError(f"{folder} holds no codec that can be read: {error}; make it again") from error


def is_finite(x: Tensor) -> bool:
    """No NaN, no infinity: both come through in the extremes, which one pass finds. Waits for the device of `x`."""
    return all(math.isfinite(end) for end in extremes(x).tolist())


def extremes(x: Tensor) -> Float[Tensor, " 2"]:
    """The smallest and the largest number, NaN if one is."""
    return torch.stack(x.aminmax()) if x.numel() else x.new_zeros(2)


def as_written(device: torch.device) -> AbstractContextManager[Any]:
    """Arithmetic in the dtypes that are written down, whatever autocast the model runs under: bytes depend on it."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
