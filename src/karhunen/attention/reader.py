"""How the coded tokens of one layer are read: decided once for a codec, with the reason where it is not from bytes.

| mode           | what meets the query | when |
|----------------|----------------------|------|
| `bytes`        | int8 look-ups, by karhunen.kernels.scan_attention | both sides are byte codes of one kind |
|                | float entries, by karhunen.kernels.byte_attention | a 256-entry table per byte, and long blocks |
| `coefficients` | coefficients decoded a chunk at a time, no inverse transform per token | any other codec |
| `decoded`      | dense keys and values of all tokens, by the model's own attention | where neither is exact |
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.attention.absorbed import Absorbed, InverseMap
from karhunen.attention.frame_queries import FrameQueries
from karhunen.codec import LayerCodec, SideCodec
from karhunen.device import HOST, computes_float64, device_of, moved
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.paths import fastest
from karhunen.kernels.scan_attention import Frames
from karhunen.quantizers.base import Quantizer
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.byte_vq import INDEX_BITS
from karhunen.quantizers.embedded import EmbeddedQuantizer
from karhunen.quantizers.gains import gain_levels
from karhunen.quantizers.vector import VectorQuantizer
from karhunen.statistics.need import SLOTS
from karhunen.store.snapshot import Snapshot

Mode = Literal["bytes", "coefficients", "decoded"]

LEAST_FOLDED_TOKENS = 1024
"""Float tables are folded with the query once a block: 256 products a plane, which shorter blocks do not repay."""


@final
@dataclass(frozen=True)
class ByteSide:
    """One side's tables with a coefficient of its own for each column, and what its gain bytes mean.

    `column` says which coefficient of the transform each stands for, 0 where none does.
    """

    tables: ByteTables
    column: Int[Tensor, "g c"]
    gain_levels: Float[Tensor, " 256"] | None

    @classmethod
    def of(cls, side: SideCodec) -> "ByteSide | str":
        """None of it where the reason given stands in the way."""
        quantizer = bytes_of(side)
        if not isinstance(quantizer, VectorQuantizer | ByteQuantizer):
            return f"{type(quantizer).__name__} has no codeword tables"
        if side.layout.pages is not None:
            return "its pages are entropy-coded"
        tables = quantizer.byte_tables
        if tables is None:
            return "its codeword tables do not have 256 entries each"
        place, n_places = tables.in_quads
        column = torch.zeros(tables.n_heads, n_places, dtype=torch.int64, device=place.device)
        for head, (first, last) in enumerate(pairwise(tables.plane_start)):
            mine = slice(tables.column_start[first], tables.column_start[last])
            column[head, place[mine]] = tables.coefficient[mine].long()
        levels = gain_levels(place.device) if quantizer.gain == "log8" else None
        return cls(replace(tables, coefficient=place, n_coefficients=n_places), column, levels)

    def of_heads(self, n_heads: int) -> Int[Tensor, "h c"]:
        """`column` of each head; joined heads share one."""
        return self.column.expand(n_heads, -1)


@final
@dataclass(frozen=True)
class Reader:
    """One layer's codec, ready to be read. Holds no token; `reason` is empty in mode `bytes`."""

    codec: LayerCodec
    mode: Mode
    reason: str
    frames: FrameQueries | None = None
    key: ByteSide | None = None
    value: ByteSide | None = None
    to_vectors: InverseMap | None = None
    scan: Frames | None = None

    @classmethod
    def of(cls, codec: LayerCodec, key_dim: int, value_dim: int, dtype: torch.dtype = torch.float32) -> "Reader":
        """For vectors of these sizes; the maps are in `dtype`."""
        if codec.key.layout.pages is not None or codec.value.layout.pages is not None:
            return cls(codec, "decoded", "entropy-coded pages are decoded whole")
        try:
            absorbed = Absorbed.of(codec, key_dim, value_dim, torch.float64)
            frames = FrameQueries.of(codec.key, absorbed.key, dtype)
        except ValueError as error:
            return cls(codec, "decoded", str(error))
        to_vectors = absorbed.value
        if codec.value.mean is not None:
            to_vectors = replace(to_vectors, offset=to_vectors.offset + codec.value.mean)
        to_vectors = to_vectors.to(dtype)
        sides = {slot: ByteSide.of(codec.side(slot)) for slot in ("key", "value")}
        reasons = [f"{slot}s: {found}" for slot, found in sides.items() if isinstance(found, str)]
        if codec.key.frame.joined != codec.value.frame.joined:
            reasons.append("keys and values group the heads differently")
        if reasons:
            return cls(codec, "coefficients", "; ".join(reasons), frames, to_vectors=to_vectors)
        if _scanned_alike(codec):
            return cls(codec, "bytes", "", frames, to_vectors=to_vectors, scan=scan_frames(codec.key, absorbed.key))
        if any(isinstance(codec.side(slot).quantizer, EmbeddedQuantizer) for slot in SLOTS):
            return cls(codec, "decoded", "layers of refinement are read where one scan reads the base of both sides")
        if frames.block_tokens is not None and frames.block_tokens < LEAST_FOLDED_TOKENS:
            reason = (
                f"float tables are read by products with the query, made anew every {frames.block_tokens} tokens; "
                f"from {LEAST_FOLDED_TOKENS} on that repays"
            )
            return cls(codec, "coefficients", reason, frames, to_vectors=to_vectors)
        key, value = sides["key"], sides["value"]
        assert isinstance(key, ByteSide) and isinstance(value, ByteSide), "both sides have tables"
        return cls(
            codec,
            "bytes",
            "",
            frames.with_columns(key.of_heads(codec.key.n_heads)),
            key,
            value,
            replace(to_vectors, matrix=_rows(to_vectors.matrix, value.of_heads(codec.value.n_heads))),
        )

    @cached_property
    def device(self) -> torch.device:
        """Where the tables lie, and so what reads them."""
        return device_of(self) or HOST

    @property
    def description(self) -> str:
        """The mode, and the kernel's path with the reason for it, or the reason why the mode is not `bytes`."""
        if self.mode != "bytes":
            return f"{self.mode} ({self.reason})"
        path, reason = fastest("byte_attention" if self.scan is None else "scan_attention", self.device.type)
        return f"bytes, {path} path ({reason})"


def bytes_of(side: SideCodec) -> Quantizer:
    """The quantizer of the bytes that every token has."""
    return side.quantizer.base if isinstance(side.quantizer, EmbeddedQuantizer) else side.quantizer


def _scanned_alike(codec: LayerCodec) -> bool:
    """Whether both sides are look-ups of one kind, which one scan reads."""
    sides = [bytes_of(side) for side in (codec.key, codec.value)]
    kinds = {side.lookups.index_bits if isinstance(side, ByteQuantizer) else None for side in sides}
    return len(kinds) == 1 and kinds <= set(INDEX_BITS.values())


def scan_frames(side: SideCodec, inverse: InverseMap) -> Frames:
    """The key frame as karhunen.kernels.scan_attention takes it, float32."""
    rotary = side.rotary if side.rotary is not None and side.frame.needs_rotary else None
    mean = torch.zeros_like(inverse.offset) if side.mean is None else side.mean.to(inverse.offset)
    start, n = (rotary.offset, rotary.n_rotated // 2) if rotary is not None else (0, 0)
    step = 2 if rotary is not None and rotary.interleaved else 1
    first = tuple(range(start, start + n * step, step))
    return Frames(
        matrix=inverse.matrix.mT.float().contiguous(),
        offset=inverse.offset.float(),
        mean=mean.float(),
        first=first,
        second=tuple(i + (1 if step == 2 else n) for i in first),
        frequencies=tuple(rotary.inv_freq.double().tolist()) if rotary is not None else (),
        block_tokens=side.frame.block_tokens if rotary is not None else None,
    )


def _rows(matrix: Float[Tensor, "h r d"], index: Int[Tensor, "h c"]) -> Float[Tensor, "h c d"]:
    return matrix.gather(1, index[..., None].expand(-1, -1, matrix.shape[-1])).contiguous()


def reader_of(codec: LayerCodec, held: Snapshot) -> Reader:
    """The reader of a layer for what it holds, where it is held; made once for a codec and a device."""
    key, value = held.recent["key"], held.recent["value"]
    name = (key.device, key.dtype, key.shape[1], key.shape[3], value.shape[1], value.shape[3])
    if name not in codec.prepared:
        codec.prepared[name] = _made_for(codec, key, value)
    return codec.prepared[name]


def _made_for(codec: LayerCodec, key: Tensor, value: Tensor) -> Reader:
    codec = codec.to(key.device)
    if not computes_float64(key.device):
        return Reader(codec, "decoded", f"{key.device.type} has no float64, so vectors are decoded on the host")
    made = Reader.of(codec, key.shape[-1], value.shape[-1], torch.promote_types(key.dtype, torch.float32))
    return moved(made, key.device)  # of a codec without a tensor (float8, no transform) the maps are made on the host
