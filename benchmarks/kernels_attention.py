"""Attention from bytes against the fastest dense attention, on a CPU.

For each shape and length every contender runs once per round, in turn; a speed-up is the median over rounds of the
ratio within a round, so that a machine whose speed drifts slows both. Dense contenders: torch's SDPA in float32 with
native GQA and two matrix products with a softmax between (the faster of the two counts), and SDPA in bfloat16.
The kernel reads one frame for all tokens, or frames of 256 and 64; making the frames (rotate the query for each block,
then multiply by the inverse transform) is timed apart and included where the column says so.

    python benchmarks/kernels_attention.py --threads 1 --tokens 4096 16384 65536 --json out.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from karhunen.kernels.byte_attention import CodedTokens, byte_attention, choose_path
from karhunen.kernels.byte_tables import ByteTables

PLANE_WIDTHS = {
    # Groups of a 64-dimensional head as water-filling forms them: strong coefficients nearly alone, weak ones together.
    16: (1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 9),
    10: (2, 3, 4, 5, 5, 6, 7, 8, 10, 14),
}
FRAMES = (None, 256, 64)


@dataclass(frozen=True)
class Shape:
    """KV heads, query heads per KV head, head size."""

    h: int
    q: int
    d: int


SHAPES = (Shape(3, 3, 64), Shape(8, 4, 128), Shape(16, 1, 64), Shape(8, 1, 128))


def main() -> None:
    """Measure, and print one line per shape, length and rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--planes", type=int, nargs="+", default=[16, 10], choices=sorted(PLANE_WIDTHS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    choice = choose_path("cpu")
    print(f"path {choice.path} ({choice.reason}), {options.threads} thread(s), torch {torch.__version__}")
    records = []
    for shape in SHAPES:
        for t in options.tokens:
            record = measure(shape, t, options.planes, options.rounds, choice.path)
            records.append(record)
            print("\n".join(lines(record)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


def measure(shape: Shape, t: int, n_planes: list[int], rounds: int, path: str) -> dict:
    """Milliseconds of every contender, round by round."""
    generator = torch.Generator().manual_seed(0)
    h, q, d = shape.h, shape.q, shape.d
    query = torch.randn(1, h * q, 1, d, generator=generator)
    k, v = (torch.randn(1, h, t, d, generator=generator) for _ in range(2))
    contenders: dict[str, Callable[[], object]] = {
        "sdpa_float32": lambda: F.scaled_dot_product_attention(query, k, v, enable_gqa=q > 1),
        "matmul_float32": lambda: matmul_attention(query.view(1, h, q, d), k, v),
    }
    half = [x.bfloat16() for x in (query, k, v)]
    contenders["sdpa_bfloat16"] = lambda: F.scaled_dot_product_attention(*half, enable_gqa=q > 1)

    for block_tokens in FRAMES[1:]:
        contenders[f"make_frames_{block_tokens}"] = frame_maker(query.view(h, q, d), t, block_tokens, generator)
    for planes in n_planes:
        keys, values = (example_side(shape, t, planes, generator) for _ in range(2))
        for block_tokens in FRAMES:
            n = 1 if block_tokens is None else -(-t // block_tokens)
            frames = torch.randn(1, h, q, n, d, generator=generator) / d**0.5
            contenders[f"bytes_{planes}_{block_tokens or 'one'}"] = lambda f=frames, k=keys, v=values, b=block_tokens: (
                byte_attention(f, k, v, path=path, block_tokens=b, scale=d**-0.5)
            )
    for run in contenders.values():
        run()
    milliseconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
    return {"shape": asdict(shape), "tokens": t, "milliseconds": milliseconds}


def lines(record: dict) -> list[str]:
    """One line per rate: milliseconds, then speed-ups (median over rounds, with the quartiles) for each frame size."""
    ms, shape = record["milliseconds"], record["shape"]
    fastest = min(("sdpa_float32", "matmul_float32"), key=lambda name: statistics.median(ms[name]))
    dense = " ".join(f"{name} {statistics.median(ms[name]):.2f}" for name in ms if name.endswith(("32", "16")))
    out = [f"h={shape['h']} q={shape['q']} d={shape['d']} t={record['tokens']}: {dense} ms"]
    for name in (name for name in ms if name.startswith("bytes_")):
        _, planes, frame = name.split("_")
        frames = ms.get(f"make_frames_{frame}", [0.0] * len(ms[name]))
        whole = [a + b for a, b in zip(ms[name], frames, strict=True)]
        out.append(
            f"    {planes} planes per 64, frame {frame:>3}: {statistics.median(ms[name]):7.3f} ms"
            f" + frames {statistics.median(frames):6.3f} | x{speed_up(ms[fastest], whole)} of {fastest}"
            f" | x{speed_up(ms['sdpa_bfloat16'], whole)} of bfloat16"
        )
    return out


def speed_up(slow: list[float], fast: list[float]) -> str:
    """Median and quartiles of the ratios within a round, and the ratio of the best rounds."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(slow, fast, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f}, best {min(slow) / min(fast):.2f})"


def matmul_attention(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook's two products; a group's query heads share each key read."""
    return ((query * query.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v


def frame_maker(query: Tensor, t: int, block_tokens: int, generator: torch.Generator) -> Callable[[], Tensor]:
    """The work of one decode step on the query's side: one rotation and one transform per block of keys."""
    h, _, d = query.shape
    n = -(-t // block_tokens)
    angle = torch.arange(n)[:, None] * block_tokens * 10000.0 ** (-torch.arange(d // 2) / (d / 2))
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    transform = torch.randn(h, d, d, generator=generator) / d**0.5

    def make() -> Tensor:
        turned = torch.cat((-query[..., d // 2 :], query[..., : d // 2]), -1)
        rotated = query[:, :, None] * cos + turned[:, :, None] * sin
        return (rotated.view(h, -1, d) @ transform).view(1, h, -1, n, d)

    return make


def example_side(shape: Shape, t: int, planes: int, generator: torch.Generator) -> CodedTokens:
    """Random codes, tables and gains; the capacity is not the token count, as in a growing cache."""
    heads = []
    for _ in range(shape.h):
        order = torch.randperm(shape.d, generator=generator)
        widths = PLANE_WIDTHS[planes] * (shape.d // 64)
        indices = order.split(list(widths))
        heads.append([(torch.randn(256, len(index), generator=generator).half(), index) for index in indices])
    tables = ByteTables.from_planes(heads, shape.d)
    codes = torch.randint(0, 256, (1, tables.n_planes, t + 1024), generator=generator, dtype=torch.uint8)
    gain = 0.5 + torch.rand(1, shape.h, t + 1024, generator=generator)
    return CodedTokens(codes[..., :t], tables, gain.half()[..., :t])


if __name__ == "__main__":
    main()
