"""Everything a GPU can say about the kernels in one run of under six minutes: are they right, and how fast.

    python benchmarks/gpu_check.py            # on a GPU; needs torch and triton, and transformers for the whole step
    python benchmarks/gpu_check.py --small    # anywhere: small shapes, without a GPU under Triton's interpreter

Correctness: every kernel against its definition in float64 (gpu_correct.py). Speed, for one layer of Llama 3.1 8B (8 KV
heads × 4 queries × 128): attention from bytes, frames of the query included, against the fastest dense attention in
bfloat16, by kind of table; coding against a copy on the device; a step of a small model with and without CUDA graphs.
Times are of CUDA graphs, caches flushed. Tables come last; all numbers go to $OUT/gpu_check.json.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
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
    vars(shapes)["__getattr__"] = lambda name: type(name, (), {"__class_getitem__": classmethod(lambda cls, _: object)})
    sys.modules["jaxtyping"] = shapes

from gpu_correct import DEVICE, checks  # noqa: E402
from gpu_shapes import BLOCK, SIZES, D, H, Q, frames_of, side_of, tables_of  # noqa: E402
from gpu_timing import milliseconds  # noqa: E402

from karhunen.kernels.byte_tables import ByteTables  # noqa: E402

BUDGET_SECONDS = 300
"""No case starts later."""
TABLES = ("additive", "free", "overlapping", "float16")
SPEED_KINDS = ("additive", "additive, folded", *TABLES[1:])
"""Variants side by side. Folded: the query is multiplied with 32 rows of each quad once a block, and a byte's score is
the sum of two of the products; the others decode entries and multiply them on tensor cores."""
LENGTHS_AND_BATCHES = (  # most telling first
    (131072, 8), (32768, 8), (8192, 1), (131072, 1), (131072, 32), (32768, 32), (8192, 32), (8192, 8), (32768, 1)
)  # fmt: skip
NO_SPEED = "times are of Triton's interpreter on a CPU and say nothing about a GPU"


@dataclass(frozen=True)
class Size:
    """What is timed: a layer, its contexts, tokens coded at once, bytes copied."""

    h: int = H
    q: int = Q
    d: int = D
    sizes: tuple[int, ...] = SIZES
    cases: tuple[tuple[int, int], ...] = LENGTHS_AND_BATCHES
    coded: int = 32768
    copied: int = 1 << 32


SMALL = Size(h=1, q=2, d=16, sizes=(3, 5, 8), cases=((96, 1),), coded=32, copied=1 << 20)


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
    """Check, measure, print; 1 if a kernel is wrong or a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="small shapes; needs no GPU")
    small = parser.parse_args().small
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: nothing to check; pip install triton", file=sys.stderr)
        return 2
    if not GPU and not small:
        print("no GPU here; --small runs small shapes under Triton's interpreter", file=sys.stderr)
        return 2
    size, run = SMALL if small else Size(), Run()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if GPU else f'no GPU: {NO_SPEED}'}")
    for name, check, *arguments in checks(small):
        run.case("correct", name, check, *arguments)
    measure(run, size, small)
    for table, rows in run.rows.items():
        print(f"\n{table}", *(f"  {as_line(row)}" for row in rows), sep="\n")
    wrong = [row["case"] for row in run.rows["correct"] if not row.get("right")]
    failed = [row["case"] for rows in run.rows.values() for row in rows if "error" in row]
    print(f"\nnot shown to be right: {wrong}" if wrong else "\nevery kernel agrees with its definition")
    if failed:
        print(f"failed: {failed}")
    if not GPU:
        print(NO_SPEED)
    return 1 if wrong or failed else 0


def measure(run: Run, size: Size, small: bool) -> None:
    """All that is timed."""
    copied = run.case("copy", f"{size.copied >> 20} MiB on the device", copy_speed, size).get("GB/s", float("nan"))
    for t, b in size.cases:
        dense = run.case("dense", f"{t:6} tokens × {b:2}", dense_speed, size, t, b).get("fastest_ms", float("nan"))
        for kind in SPEED_KINDS:
            run.case("bytes", f"{t:6} tokens × {b:2}  {kind}", byte_speed, size, t, b, kind, dense, copied)
        if (t, b) == size.cases[min(1, len(size.cases) - 1)]:
            for kind in TABLES[: 2 if small else 4]:
                run.case("coding", f"{kind}, {size.coded} tokens × {size.h} heads", coding_speed, size, kind, copied)
    run.case("step", "one token, small model", step_speed, small)


def copy_speed(size: Size) -> dict:
    """Bytes read plus bytes written."""
    source = torch.randint(0, 256, (size.copied,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return {"GB/s": 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6}


def dense_speed(size: Size, t: int, b: int) -> dict:
    """Every dense attention that runs; queries of a group as heads of their own, as rows, or with expanded keys."""
    n_bytes = 2 * b * size.h * t * size.d * 2
    free = torch.cuda.mem_get_info()[0] if GPU else 1 << 32
    if n_bytes * 1.1 > free:
        return {"skipped": f"{n_bytes / 2**30:.0f} GiB do not fit in {free / 2**30:.0f}"}
    k, v = (torch.randn(b, size.h, t, size.d, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    query = torch.randn(b, size.h * size.q, 1, size.d, dtype=torch.bfloat16, device=DEVICE)
    rows, row = query.view(b, size.h, size.q, size.d), {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        name = backend.name.split("_")[0].lower()
        row[f"{name}_gqa"] = dense_time(backend, query, k, v, enable_gqa=True)
        row[f"{name}_rows"] = dense_time(backend, rows, k, v)
    if n_bytes * (size.q + 1.1) < free and b * t <= 1 << 20:
        wide = [x.repeat_interleave(size.q, 1) for x in (k, v)]
        row["flash_expanded"] = dense_time(SDPBackend.FLASH_ATTENTION, query, *wide)
        del wide
    row["flash_decoding"] = flash_decoding_time(query, k, v)
    times = [value for value in row.values() if isinstance(value, float)]
    return {"fastest_ms": min(times), "GB/s": n_bytes / min(times) / 1e6, **row} if times else row


def dense_time(backend: SDPBackend, query: Tensor, k: Tensor, v: Tensor, **options: bool) -> float | str:
    """Milliseconds, or why not."""
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return milliseconds(lambda: F.scaled_dot_product_attention(query, k, v, **options))
    except RuntimeError as error:
        return type(error).__name__


def flash_decoding_time(query: Tensor, k: Tensor, v: Tensor) -> float | str:
    """That of the flash-attn package, split over tokens; or why not."""
    if not GPU or importlib.util.find_spec("flash_attn") is None:
        return "not installed" if GPU else "no GPU"
    from flash_attn import flash_attn_with_kvcache

    q, keys, values = (x.transpose(1, 2).contiguous() for x in (query, k, v))
    return milliseconds(lambda: flash_attn_with_kvcache(q, keys, values))


@cache
def speed_tables(size: Size, kind: str) -> tuple[ByteTables, ByteTables]:
    key, value = (tables_of(kind, size.h, size.d, size.sizes) for _ in range(2))
    return key, value


def byte_speed(size: Size, t: int, b: int, kind: str, dense_ms: float, copied: float) -> dict:
    """A step's attention to coded tokens, gains of one byte a side, blocks of 64; float16 entries have one frame."""
    from karhunen.kernels.byte_attention import gpu as byte_attention
    from karhunen.kernels.scan_attention import gpu as scan_attention
    from karhunen.kernels.split_attention.launch import tuned_config

    kind, _, variant = kind.partition(", ")
    keys, values = (side_of(tables, t, b, DEVICE) for tables in speed_tables(size, kind))
    query = torch.randn(b, size.h, size.q, size.d, dtype=torch.bfloat16, device=DEVICE)
    frames, scale = frames_of(size.h, size.d, BLOCK), size.d**-0.5
    if kind == "float16":
        ms = milliseconds(lambda: byte_attention.byte_attention(query[:, :, :, None], keys, values, scale=scale))
    else:
        how: Any = {"scale": scale, "folded": bool(variant)}
        ms = milliseconds(lambda: scan_attention.scan_attention(query, keys, values, frames, **how))
    n_bytes = sum(x.numel() for side in (keys, values) for x in (side.codes, side.gain) if x is not None)
    speed = n_bytes / ms / 1e6
    return {
        "ms": ms,
        "speed-up": dense_ms / ms,
        "GB/s": speed,
        "of copy": speed / copied,
        "launch": str(tuned_config()),
    }


def coding_speed(size: Size, kind: str, copied: float) -> dict:
    """One side of one layer; bytes are those of the vectors in bfloat16, as a cache without compression holds them."""
    from karhunen.kernels.byte_decode import gpu as byte_decode
    from karhunen.kernels.byte_encode import gpu as byte_encode

    tables, t = speed_tables(size, kind)[0], size.coded
    x = torch.randn(1, size.h, t, size.d, device=DEVICE)
    turn = torch.randn(size.h, size.d, size.d, device=DEVICE)
    codes = byte_encode.byte_encode(x, tables)
    encode = milliseconds(lambda: byte_encode.byte_encode(x @ turn, tables))
    decode = milliseconds(lambda: byte_decode.byte_decode(codes, tables) @ turn)
    one = milliseconds(lambda: byte_encode.byte_encode(x[:, :, :1] @ turn, tables))
    speeds = {name: 2 * x.numel() / ms / 1e6 for name, ms in (("encode", encode), ("decode", decode))}
    shares = {f"{name} of copy": speed / copied for name, speed in speeds.items()}
    return {**{f"{name} GB/s": speed for name, speed in speeds.items()}, **shares, "one_token_ms": one}


def step_speed(small: bool) -> dict:
    """A decode step of a random Llama from its compressed cache: as Python launches it, and as a CUDA graph."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    from gpu_step import Step

    from karhunen.kernels.paths import forced

    step = Step.of(small, DEVICE)
    with torch.inference_mode(), nullcontext() if GPU else forced("gpu"):
        step.run()
        begun = time.perf_counter()
        step.run()
        if GPU:
            torch.cuda.synchronize()
        row: dict[str, Any] = {"python_ms": 1e3 * (time.perf_counter() - begun)}
        row["graph_ms"] = milliseconds(step.run) if GPU else "no GPU"
        return {**row, "read": step.how_read()}


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
