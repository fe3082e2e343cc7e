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
from karhunen.folder import read_folder, write_folder
from karhunen.frames.rope_frame import RopeFrame
from karhunen.packing.base import Layout
from karhunen.quantizers.base import Codes, Quantizer
from karhunen.statistics.identity import ModelIdentity
from karhunen.statistics.need import SLOTS, Slot
from karhunen.statistics.rotary import Rotary
from karhunen.transforms.base import Transform
from karhunen.values import assemble, dismantle, fingerprint, kinds_in
from karhunen.windows.base import Window
from karhunen.windows.left_out import without
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
        """By name."""
        return self.key if slot == "key" else self.value

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
            said.append(f"codes of {8 * sum(side.layout.bytes_per_token for side in sides) / n:.2f} bits")
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
        write_folder(Path(folder), FORMAT, VERSION, {"codec": dismantle(self, tensors)}, tensors)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Codec":
        """Read an artifact, and log its report card; ValueError saying what is wrong with it."""
        config, tensors = read_folder(Path(folder), FORMAT, *READ)
        made = assemble(config.get("codec"), kinds_in(*PART_PACKAGES), tensors)
        if not isinstance(made, cls):
            raise ValueError(f"{folder} holds a {type(made).__name__}, not a codec")
        if made.card is not None:
            level = logging.INFO if made.card.passed else logging.WARNING
            _LOG.log(level, "%s: %s; all: `karhunen inspect %s`", folder, made.card.line, folder)
        return made


def is_finite(x: Tensor) -> bool:
    """No NaN, no infinity: both come through in the extremes, which one pass finds. Waits for the device of `x`."""
    return all(math.isfinite(end) for end in extremes(x).tolist())


def extremes(x: Tensor) -> Float[Tensor, " 2"]:
    """The smallest and the largest number, NaN if one is."""
    return torch.stack(x.aminmax()) if x.numel() else x.new_zeros(2)


def as_written(device: torch.device) -> AbstractContextManager[Any]:
    """Arithmetic in the dtypes that are written down, whatever autocast the model runs under: bytes depend on it."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
