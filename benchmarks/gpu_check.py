"""Everything a GPU can say about the kernels in one run of under six minutes: are they right, and how fast.

    python benchmarks/gpu_check.py            # from a checkout; needs torch and triton, nothing else

Correctness: every kernel against its naive twin in float64, on memory poisoned beyond the valid tokens. Speed, for one
layer of Llama 3.1 8B (8 KV heads × 4 queries × 128): attention from bytes against the fastest of torch's attentions in
bfloat16, from CUDA graphs, caches flushed. Bytes counted are codes, gains and frames; making frames is not timed.
Without a GPU: small shapes under Triton's interpreter. Tables come last; all numbers go to $OUT/gpu_check.json.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, below
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
if importlib.util.find_spec("jaxtyping") is None:  # shapes in annotations, which nothing here checks
    shapes = types.ModuleType("jaxtyping")
    for kind in ("Bool", "Float", "Int", "UInt8"):
        setattr(shapes, kind, type(kind, (), {"__class_getitem__": classmethod(lambda cls, _: object)}))
    sys.modules["jaxtyping"] = shapes

from karhunen.kernels.byte_attention import CodedTokens, naive  # noqa: E402
from karhunen.kernels.byte_decode import naive as naive_decode  # noqa: E402
from karhunen.kernels.byte_encode import naive as naive_encode  # noqa: E402
from karhunen.kernels.byte_tables import ByteTables  # noqa: E402

BUDGET_SECONDS = 300 if GPU else 100
"""No case starts later."""
DEVICE = torch.device("cuda" if GPU else "cpu")
H, Q, D = 8, 4, 128
HALF_8 = (1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 9)  # groups of 64 coefficients, as water-filling forms them
HALF_12 = (2, 3, 4, 5, 5, 6, 7, 8, 10)
WIDTHS = {"8x": (*HALF_8, *HALF_8), "12x": (*HALF_12, 14, *HALF_12, 7, 7)}  # 32 and 21 bytes
LENGTHS_AND_BATCHES = (  # most telling first
    (131072, 8), (32768, 8), (8192, 1), (131072, 1), (131072, 32), (32768, 32), (8192, 32), (8192, 8), (32768, 1)
)  # fmt: skip


@dataclass
class Run:
    """What was found so far, and when to stop."""

    begun: float = field(default_factory=time.monotonic)
    rows: dict[str, list[dict]] = field(default_factory=dict)

    def case(self, table: str, name: str, measure: Callable[..., dict], *arguments: Any) -> dict:
        """The case's row, added to the table; an error becomes a row as well."""
        started = time.monotonic()
        if started - self.begun > BUDGET_SECONDS:
            row: dict = {"skipped": f"{BUDGET_SECONDS} s are over"}
        else:
            try:
                row = measure(*arguments)
            except Exception as error:  # noqa: BLE001
                words = str(error).strip().splitlines() or [""]
                row = {"error": f"{type(error).__name__}: {words[-1][:160]}"}
            if GPU:
                torch.cuda.empty_cache()
        row = {"case": name, **row, "took_s": round(time.monotonic() - started, 1)}
        self.rows.setdefault(table, []).append(row)
        print(f"[{time.monotonic() - self.begun:3.0f} s] {table}: {as_line(row)}", flush=True)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "gpu_check.json").write_text(json.dumps(self.rows, indent=1))
        return row


def as_line(row: dict) -> str:
    return "  ".join(
        str(value) if key == "case" else f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
    )


def main() -> int:
    """Check, measure, print; 1 if a kernel is wrong."""
    run = Run()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if GPU else 'no GPU here: correctness alone'}")
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: nothing to check")
        return 0
    for name, check, *options in checks():
        run.case("correct", name, check, *options)
    if GPU:
        copied = run.case("copy", "4 GiB on the device", copy_speed).get("GB/s", float("nan"))
        for t, b in LENGTHS_AND_BATCHES:
            dense = run.case("dense", f"{t:6} tokens × {b:2}", dense_speed, t, b).get("fastest_ms", float("nan"))
            for rate, block_tokens in ((r, k) for r in WIDTHS for k in (None, 64)):
                name = f"{t:6} tokens × {b:2}  {rate:3}  {'one frame ' if block_tokens is None else 'blocks of 64'}"
                run.case("bytes", name, byte_speed, t, b, rate, block_tokens, dense, copied)
            if (t, b) == LENGTHS_AND_BATCHES[1]:
                for rate in WIDTHS:
                    run.case("coding", f"{rate}, {H} heads × 32768 tokens", coding_speed, rate)
    for table, rows in run.rows.items():
        print(f"\n{table}", *(f"  {as_line(row)}" for row in rows), sep="\n")
    wrong = [row["case"] for row in run.rows["correct"] if not row.get("right")]
    print(f"\nnot shown to be right: {wrong}" if wrong else "\nevery kernel agrees with its definition")
    return 1 if wrong else 0


def checks() -> Iterator[tuple]:
    """Name, function and arguments of each correctness case."""
    yield "encode", check_coding, "encode", False
    yield "encode, residual", check_coding, "encode", True
    yield "decode, residual", check_coding, "decode", True
    blocks = {"block_tokens": 64, "first_offset": 41}
    yield "attention, 64 tokens", check_attention, {"t": 64}, {}
    yield "attention, 1 token, q 1", check_attention, {"t": 1, "q": 1}, {}
    yield "attention, blocks of 64", check_attention, {"t": 1000 if GPU else 300, **blocks}, {}
    yield "attention, blocks of 3", check_attention, {"t": 63, "block_tokens": 3, "first_offset": 1}, {}
    yield "attention, mask and cap", check_attention, {"t": 300, "b": 2, "hidden": True}, {"softcap": 3.0}
    yield "attention, d 256, q 8, residual", check_attention, {"t": 100, "d": 256, "q": 8, "residual": True}, {}
    if GPU:
        for d in (64, 80, 128):
            yield f"attention, d {d}, q 3", check_attention, {"t": 1000, "d": d, "q": 3}, {}
        yield "attention, q 20", check_attention, {"t": 1000, "q": 20}, {}
        yield "attention, many splits", check_attention, {"t": 40000, "q": 4, **blocks}, {}
        yield "attention, tuned", check_attention, {"t": 1000, "q": 4, "tuned": True}, {}


def check_coding(what: str, residual: bool) -> dict:
    from karhunen.kernels.byte_decode import gpu as gpu_decode
    from karhunen.kernels.byte_encode import gpu as gpu_encode

    tables = random_tables(2, 64, HALF_8, residual)
    t = 1000 if GPU else 70
    x, codes = torch.randn(2, 2, t, 64), torch.randint(0, 256, (2, tables.n_planes, t), dtype=torch.uint8)
    if what == "encode":
        wanted, got = naive_encode.byte_encode(x, tables), gpu_encode.byte_encode(x.to(DEVICE), tables, tile=32)
    else:
        wanted, got = naive_decode.byte_decode(codes, tables), gpu_decode.byte_decode(codes.to(DEVICE), tables, tile=32)
    different = int((got.cpu() != wanted).sum())
    return {"right": different == 0, "different": different, "of": wanted.numel()}


def check_attention(shape: dict, options: dict) -> dict:
    from karhunen.kernels.byte_attention import gpu

    t, b, h, q, d = (shape.get(name, default) for name, default in (("t", 64), ("b", 1), ("h", 2), ("q", 4), ("d", 64)))
    options = {"scale": d**-0.5, "block_tokens": shape.get("block_tokens"), **options}
    options["first_offset"] = shape.get("first_offset", 0)
    n = 1 if options["block_tokens"] is None else (t - 1 + options["first_offset"]) // options["block_tokens"] + 1
    frames = torch.randn(b, h, q, n, d)
    options["key_bias"] = torch.randn(b, h, q, n)
    if options["block_tokens"] is not None:
        options["offset_bias"] = torch.randn(b, h, q, n, options["block_tokens"])
    widths = HALF_8 if d == 64 else (7,) * (d // 7) + ((d % 7,) if d % 7 else ())
    keys = random_side(t, b, random_tables(h, d, widths, shape.get("residual", False)), "half")
    values = random_side(t, b, random_tables(h, d, widths, False), "levels")
    if shape.get("hidden"):
        options["mask"], options["first_visible"] = torch.rand(b, t) > 0.3, torch.randint(0, t, (b, q))
    wanted = naive.byte_attention(frames.double(), at_home(keys), at_home(values), **options)
    options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    options["launch"] = None if shape.get("tuned") else gpu.Launch(64, 4)
    got = gpu.byte_attention(frames.to(DEVICE), keys, values, **options)
    errors = {"mean": got.mean.cpu() - wanted.mean, "log_sum": got.log_sum.cpu() - wanted.log_sum}
    errors = {name: float(error.nan_to_num(0, torch.inf).abs().max()) for name, error in errors.items()}
    pairs = ((got.mean, wanted.mean), (got.log_sum, wanted.log_sum))
    right = all(
        torch.allclose(found.cpu().double(), known, rtol=0, atol=gpu.TOLERANCE * float(known.abs().max()))
        for found, known in pairs
    )
    return {"right": right, **errors}


def random_tables(h: int, d: int, widths: tuple[int, ...], residual: bool = False) -> ByteTables:
    """Every head's coefficients shuffled and dealt to planes; a residual stage codes six of them again."""
    again = [torch.arange(6)] if residual else []
    parts = [[*torch.randperm(d).split(list(widths)), *again] for _ in range(h)]
    return ByteTables.from_planes([[(torch.randn(256, len(p)).half() / 2, p) for p in head] for head in parts], d)


def random_side(t: int, b: int, tables: ByteTables, gain: str) -> CodedTokens:
    """Random bytes and gains, cut from larger buffers that are poisoned beyond them."""

    def cut(n: int, poison: float, dtype: torch.dtype) -> Tensor:
        return torch.full((b, n, t // 64 * 64 + 128), poison, dtype=dtype, device=DEVICE)[..., :t]

    codes = cut(tables.n_planes, 255, torch.uint8).random_(0, 256)
    index = cut(tables.n_heads, 255, torch.uint8).random_(0, 256)
    levels = torch.linspace(-2, 1, 256, device=DEVICE).exp()
    if gain == "levels":
        return CodedTokens(codes, tables, index, levels)
    half = cut(tables.n_heads, torch.nan, torch.float16)
    return CodedTokens(codes, tables, half.copy_(levels[index.long()]))


def at_home(side: CodedTokens) -> CodedTokens:
    """The same where the definition runs."""
    levels = None if side.gain_levels is None else side.gain_levels.cpu()
    return CodedTokens(side.codes.cpu(), side.tables, side.gain.cpu(), levels)


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of a CUDA graph's replays, the second-level cache flushed before each."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph, flush = torch.cuda.CUDAGraph(), torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    with torch.cuda.graph(graph):
        run()
    times, begun = [], time.monotonic()
    while len(times) < 7 or (len(times) < 50 and time.monotonic() - begun < 0.4):
        flush.random_(0, 2)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def copy_speed() -> dict:
    """Bytes read plus bytes written."""
    source = torch.randint(0, 256, (1 << 32,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return {"GB/s": 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6}


def dense_speed(t: int, b: int) -> dict:
    """Every dense attention that runs; queries of a group as heads of their own, as rows, or with expanded keys."""
    n_bytes = 2 * b * H * t * D * 2
    if n_bytes * 1.1 > (free := torch.cuda.mem_get_info()[0]):
        return {"skipped": f"{n_bytes / 2**30:.0f} GiB do not fit in {free / 2**30:.0f}"}
    k, v = (torch.randn(b, H, t, D, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    query = torch.randn(b, H * Q, 1, D, dtype=torch.bfloat16, device=DEVICE)
    rows, row = query.view(b, H, Q, D), {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        name = backend.name.split("_")[0].lower()
        row[f"{name}_gqa"] = dense_time(backend, query, k, v, enable_gqa=True)
        row[f"{name}_rows"] = dense_time(backend, rows, k, v)
    if n_bytes * (Q + 1.1) < free and b * t <= 1 << 20:
        k, v = (x.repeat_interleave(Q, 1) for x in (k, v))
        row["flash_expanded"] = dense_time(SDPBackend.FLASH_ATTENTION, query, k, v)
    times = [value for value in row.values() if isinstance(value, float)]
    return {"fastest_ms": min(times), "GB/s": n_bytes / min(times) / 1e6, **row}


def dense_time(backend: SDPBackend, query: Tensor, k: Tensor, v: Tensor, **options: bool) -> float | str:
    """Milliseconds, or why not."""
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return milliseconds(lambda: F.scaled_dot_product_attention(query, k, v, **options))
    except RuntimeError as error:
        return type(error).__name__


def byte_speed(t: int, b: int, rate: str, block_tokens: int | None, dense_ms: float, copied: float) -> dict:
    """Attention from bytes with float16 frames and a gain of one byte a side, against the dense time."""
    from karhunen.kernels.byte_attention import gpu

    tables = speed_tables(rate)
    keys, values = (random_side(t, b, tables[i], "levels") for i in range(2))
    frames = torch.randn(b, H, Q, -(-t // (block_tokens or t)), D, dtype=torch.float16, device=DEVICE)
    options: dict[str, Any] = {"scale": D**-0.5, "block_tokens": block_tokens}
    ms = milliseconds(lambda: gpu.byte_attention(frames, keys, values, **options))
    n_bytes = sum(side.codes.numel() + side.gain.numel() for side in (keys, values)) + frames.nbytes
    speed, best = n_bytes / ms / 1e6, str(gpu.tuned_config())
    return {"ms": ms, "speed-up": dense_ms / ms, "GB/s": speed, "of copy": speed / copied, "launch": best}


@cache
def speed_tables(rate: str) -> tuple[ByteTables, ByteTables]:
    return random_tables(H, D, WIDTHS[rate]), random_tables(H, D, WIDTHS[rate])


def coding_speed(rate: str) -> dict:
    """One side of one layer."""
    from karhunen.kernels.byte_decode import gpu as gpu_decode
    from karhunen.kernels.byte_encode import gpu as gpu_encode

    tables, t = speed_tables(rate)[0], 32768
    x = torch.randn(1, H, t, D, device=DEVICE)
    encode = milliseconds(lambda: gpu_encode.byte_encode(x, tables))
    one = milliseconds(lambda: gpu_encode.byte_encode(x[:, :, :1], tables))
    codes = gpu_encode.byte_encode(x, tables)
    decode = milliseconds(lambda: gpu_decode.byte_decode(codes, tables))
    return {"encode_tokens/s": t / encode * 1e3, "one_token_ms": one, "decode_tokens/s": t / decode * 1e3}


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
