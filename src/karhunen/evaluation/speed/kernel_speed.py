"""One decode step of attention in one layer: from bytes, against the dense attentions of torch.

The coded layer is made up (random tables and bytes of a given rate, in the recipe `karhunen`'s frame): speed depends
on shapes alone. All of the step is timed: frames of the query, kernel, exact window, merging. Numbers are made on the
host, so that every device is given the same.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from karhunen.attention import fused
from karhunen.attention.reader import reader_of
from karhunen.codec import LayerCodec, Packed, SideCodec
from karhunen.device import HOST, computes_float64, moved
from karhunen.evaluation.speed.measured import Timings
from karhunen.frames.rope_frame import RopeFrame
from karhunen.packing.bit_fields import BitFields
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.byte_vq import INDEX_BITS, TableKind
from karhunen.statistics.need import SLOTS, Slot
from karhunen.statistics.rotary import Rotary
from karhunen.store.positions import Positions
from karhunen.store.snapshot import Snapshot
from karhunen.transforms.affine_map import AffineMap

N_SINK, N_RECENT = 4, 136
N_ENCODED = 256
"""Tokens coded at a time where the cost of coding is measured."""
BLOCK_TOKENS = 64
DENSE = ("sdpa_float32", "matmul_float32", "sdpa_bfloat16")
"""Dense contenders for the fastest; bfloat16 is slow on processors without instructions for it."""


@final
@dataclass(frozen=True)
class Shape:
    """KV heads, query heads per KV head, head size."""

    h: int
    q: int
    d: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """A shape as people write it, `8x4x128`: KV heads, query heads of each, head size."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"shape {text!r} is not HxQxD (KV heads, query heads of each, head size), as in 3x3x64")
        if int(parts[2]) % 8:
            raise ValueError(f"head size {parts[2]} of shape {text!r} is not a multiple of 8")
        return cls(*(int(part) for part in parts))

    def __str__(self) -> str:
        return f"{self.h}x{self.q}x{self.d}"


def measure(
    shape: Shape,
    n_tokens: int,
    batch: int,
    bits: float,
    rounds: int,
    tables: TableKind = "free",
    device: torch.device = HOST,
) -> dict[str, Any]:
    """Milliseconds, speed-ups, bytes and the error against float64, as a JSON row; all of it on one device.

    ValueError for a device without float64, where vectors are coded and decoded on the host.
    """
    if not computes_float64(device):
        raise ValueError(f"{device} has no float64, so nothing is read from bytes there; use another --device")
    generator = torch.Generator(HOST).manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=HOST).to(device)

    codec = made_up_codec(shape, bits, generator, tables)
    held = moved(made_up_layer(codec, shape, n_tokens, batch, generator), device)
    codec = codec.to(device)
    query = made(batch, shape.h * shape.q, 1, shape.d)
    key, value = (made(batch, shape.h, n_tokens, shape.d) for _ in range(2))
    q16, k16, v16 = (x.bfloat16() for x in (query, key, value))
    scale, gqa = shape.d**-0.5, shape.q > 1
    reader = reader_of(codec, held)
    grouped = query.view(batch, shape.h, shape.q, shape.d) * scale
    vectors = made(batch, shape.h, N_ENCODED, shape.d)
    at = torch.arange(N_ENCODED, device=device).expand(batch, -1)
    with torch.inference_mode():
        timings = Timings.of(
            {
                "bytes": lambda: fused.attend(reader, held, query, scale=scale),
                "sdpa_float32": lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=gqa),
                "matmul_float32": lambda: (grouped @ key.mT).softmax(-1) @ value,
                "sdpa_bfloat16": lambda: F.scaled_dot_product_attention(q16, k16, v16, enable_gqa=gqa),
                "encode": lambda: [codec.side(slot).encode(vectors, at) for slot in SLOTS],
                "transform": lambda: [codec.side(slot).transform.forward(vectors) for slot in SLOTS],
            },
            rounds,
            device,
        )
    fastest = timings.fastest(*DENSE)
    n_bytes, n_dense = _bytes_read(held), key.nbytes + value.nbytes
    n_fastest = n_dense // 2 if fastest == "sdpa_bfloat16" else n_dense
    return {
        "shape": str(shape),
        "tokens": n_tokens,
        "batch": batch,
        "bits_per_element": bits,
        "tables": tables,
        "milliseconds": {name: timings.median(name) for name in timings.milliseconds},
        "fastest_dense": fastest,
        "speed_up": timings.speed_up("bytes", fastest),
        "speed_up_sdpa": timings.speed_up("bytes", "sdpa_float32"),
        "speed_up_bfloat16": timings.speed_up("bytes", "sdpa_bfloat16"),
        "bytes_read": n_bytes,
        "dense_bytes_read": n_fastest,
        "gb_per_second": n_bytes / timings.median("bytes") / 1e6,
        "dense_gb_per_second": n_fastest / timings.median(fastest) / 1e6,
        "how_read": reader.description,
        "encode_microseconds_per_token": 1e3 * timings.median("encode") / (N_ENCODED * batch),
        "transform_microseconds_per_token": 1e3 * timings.median("transform") / (N_ENCODED * batch),
        "output_error": output_error(codec, held, query) if n_tokens <= 4096 else None,
        "kl": None,  # made-up bytes have none
    }


def made_up_codec(
    shape: Shape, bits: float, generator: torch.Generator, tables: TableKind = "free", block_tokens: int = BLOCK_TOKENS
) -> LayerCodec:
    """Random tables of `bits` per element: bytes of equal or nearly equal numbers of coefficients."""
    n_bytes = round(shape.d * bits / 8)
    if not 1 <= n_bytes <= shape.d:
        raise ValueError(f"{bits} bits per element of {shape.d} are {n_bytes} bytes a head; give 1 to {shape.d}")
    sizes = [shape.d // n_bytes + (i < shape.d % n_bytes) for i in range(n_bytes)] * shape.h
    rotary = Rotary(10000.0 ** -(torch.arange(0, shape.d, 2, device=HOST) / shape.d))

    def side(frame: RopeFrame, turn: Rotary | None) -> SideCodec:
        matrix = torch.linalg.qr(torch.randn(shape.h, shape.d, shape.d, generator=generator, device=HOST))[0]
        order = [torch.randperm(shape.d, generator=generator, device=HOST) for _ in range(shape.h)]
        a, b = INDEX_BITS[tables]
        n = shape.h * shape.d
        low, high = (
            torch.randint(-60, 60, (rows, n), generator=generator, dtype=torch.int8, device=HOST)
            for rows in (2**a, 2**b)
        )
        quantizer = ByteQuantizer(
            g=shape.h,
            c=shape.d,
            gain="none",
            plane_group=torch.arange(shape.h, device=HOST).repeat_interleave(n_bytes),
            plane_size=torch.tensor(sizes, device=HOST),
            coordinates=torch.cat(order),
            low=low,
            high=high if b else high[:0],
            scale=torch.full((n,), 1 / 40, device=HOST),
        )
        mean = torch.randn(shape.h, shape.d, generator=generator, device=HOST) if frame.center else None
        mapped = AffineMap(torch.zeros(shape.h, shape.d, device=HOST), matrix, matrix.mT.contiguous())
        return SideCodec(shape.h, frame, turn, mean, mapped, quantizer, BitFields((8,) * len(sizes)))

    return LayerCodec(side(RopeFrame(block_tokens, center=True), rotary), side(RopeFrame(), None))


def made_up_layer(codec: LayerCodec, shape: Shape, n_tokens: int, batch: int, generator: torch.Generator) -> Snapshot:
    """Random bytes of all tokens but the exact ones of the window."""
    n_coded = n_tokens - N_SINK - N_RECENT
    if n_coded < 1:
        raise ValueError(f"{n_tokens} tokens leave none to be coded; give {N_SINK + N_RECENT + 1} or more")

    def exact(n: int) -> dict[Slot, Tensor]:
        return {slot: torch.randn(batch, shape.h, n, shape.d, generator=generator, device=HOST) for slot in SLOTS}

    packed: dict[Slot, Packed] = {}
    for slot in SLOTS:
        n_planes = len(codec.side(slot).quantizer.widths)
        planes = torch.randint(0, 256, (batch, n_planes, n_coded), generator=generator, dtype=torch.uint8, device=HOST)
        packed[slot] = Packed(planes, {})
    return Snapshot(exact(N_SINK), exact(N_RECENT), packed, None, Positions(), n_coded, 0)


def output_error(codec: LayerCodec, held: Snapshot, query: Tensor) -> float:
    """Of reading, not of coding: relative to attention over the decoded tokens in float64."""
    key, value = (held.dense(codec, slot).double() for slot in SLOTS)
    grouped = query.double().unflatten(1, (key.shape[1], -1)).squeeze(3) * query.shape[-1] ** -0.5
    expected = ((grouped @ key.mT).softmax(-1) @ value).flatten(1, 2)
    made = fused.attend(reader_of(codec, held), held, query, scale=query.shape[-1] ** -0.5).squeeze(2)
    return float((made - expected).norm() / expected.norm())


def _bytes_read(held: Snapshot) -> int:
    assert held.packed is not None, "the layer holds coded tokens"
    coded = sum(tensor.nbytes for side in held.packed.values() for tensor in side.tensors())
    return coded + sum(x.nbytes for part in (held.sink, held.recent) for x in part.values())
