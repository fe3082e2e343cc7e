"""SPECTRA's two ways to read, one decode step of one layer: Mode A rebuilds every key and value, Mode B builds none.

    python benchmarks/spectra_modes.py --output results/measured

Both read the same bytes: the latent joined over heads, in blocks of `--block` tokens, cut to `--rank` coefficients by
its bit plan. Arithmetic is counted in multiplications, from the shapes; time is that of the quickest call. Unpacking
and dequantizing the coefficients is common to both and is timed apart.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from karhunen.attention import absorbed, reference
from karhunen.attention.absorbed import Absorbed
from karhunen.codec import LayerCodec, Packed, SideCodec
from karhunen.evaluation.results.provenance import provenance
from karhunen.frames.rope_frame import RopeFrame
from karhunen.packing.bit_fields import FixedWidth
from karhunen.quantizers.affine import AffineQuantizer
from karhunen.quantizers.base import Codes
from karhunen.statistics.rotary import Rotary
from karhunen.transforms.affine_map import AffineMap

GROUP = 32


def side(n_heads: int, d: int, rank: int, frame: RopeFrame, rotary: Rotary | None) -> SideCodec:
    """A random rotation of the joined heads, two bits for the first `rank` coefficients, none for the others."""
    e = n_heads * d
    basis = torch.linalg.qr(torch.randn(e, e, generator=torch.Generator().manual_seed(0)))[0][None].contiguous()
    bits = torch.zeros(1, e, dtype=torch.int32)
    bits[:, :rank] = 2
    quantizer = AffineQuantizer(bits, GROUP, 1, 1.0)
    transform = AffineMap(torch.zeros(1, e), basis, basis.mT.contiguous())
    return SideCodec(n_heads, frame, rotary, None, transform, quantizer, FixedWidth().fit(quantizer.widths))


def multiplications(t: int, q: int, h: int, d: int, rank: int, block: int) -> dict[str, int]:
    """Of one query token; `rebuild` is the share of Mode A that makes keys and values."""
    e = h * d
    rebuild = 2 * t * rank * e + t * h * 2 * d  # two inverse transforms, one rotation
    read = 2 * t * q * d
    n_blocks = -(-t // block)
    fold = n_blocks * q * (2 * d + rank * d) + q * rank * d  # turn and fold the query; values back at the end
    return {
        "A": rebuild + read,
        "A, of which rebuilding": rebuild,
        "B": fold + 2 * t * q * rank,
        "B, of which folding": fold,
    }


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """The quickest of several after one to warm up: the others waited for other programs."""
    call()
    taken: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def decoded(codec: LayerCodec, key: Packed, value: Packed) -> list[Tensor]:
    pairs = ((codec.key, key), (codec.value, value))
    return [s.quantizer.decode(Codes(s.layout.unpack(p.planes), p.side)) for s, p in pairs]


def measure(t: int, given: argparse.Namespace) -> dict[str, Any]:
    h, q, d = given.kv_heads, given.query_heads, given.head_dim
    frequencies = (1e4 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)).float()
    key_side = side(h, d, given.rank, RopeFrame(given.block, joined=True), Rotary(frequencies))
    codec = LayerCodec(key_side, side(h, d, given.rank, RopeFrame(joined=True), None))
    positions = torch.arange(t)[None]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, h, t, d, generator=generator)
    query = torch.randn(1, q, 1, d, generator=generator)
    key, value = codec.key.encode(x, positions), codec.value.encode(x, positions)
    layer, scale = Absorbed.of(codec, d, d), d**-0.5
    a = reference.attend(codec, key, value, positions, query, scale)
    b = absorbed.attend(layer, key, value, positions, query, scale)
    torch.testing.assert_close(a.output, b.output, rtol=1e-3, atol=1e-4)  # no speed without equality
    shared = seconds(lambda: decoded(codec, key, value), given.repeats)
    taken = {
        "A": seconds(lambda: reference.attend(codec, key, value, positions, query, scale), given.repeats),
        "B": seconds(lambda: absorbed.attend(layer, key, value, positions, query, scale), given.repeats),
    }
    return {
        "tokens": t,
        "multiplications": multiplications(t, q, h, d, given.rank, given.block),
        "milliseconds": {"unpack and dequantize": 1e3 * shared, **{name: 1e3 * s for name, s in taken.items()}},
        "speedup": taken["A"] / taken["B"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--query-heads", type=int, default=9, help="SmolLM2-135M's, as the two below")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rank", type=int, default=96)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with torch.no_grad():
        rows = [measure(t, given) for t in given.tokens]
    settings = {k: v for k, v in vars(given).items() if k != "output"}
    body = {"what": "SPECTRA, Mode A against Mode B, one decode step of one layer", "settings": settings, "rows": rows}
    body["provenance"] = asdict(provenance())
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "spectra_modes.json").write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
