"""Registers, shared memory and spills of every GPU kernel, compiled ahead of time: needs Triton and no GPU.

    python benchmarks/gpu_compile.py                           all kernels for sm_80, sm_90, sm_100: a table
    python benchmarks/gpu_compile.py --kernel additive --arch 90    those whose name has the word
    ... --write    results/measured/gpu_kernels.json and docs/gpu_kernels.md; rows not compiled stay, with their commit

Shapes are those of one layer of Llama 3.1 8B (gpu_shapes.py). Shared memory is per program; a spill is an instruction
that writes to or reads from local memory; instructions are those of the whole program, whose loop takes one tile.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported, below
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402
import triton  # noqa: E402
from gpu_shapes import KINDS, SIZES, D, H, Q, frames_of, side_of, tables_of  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from karhunen.kernels.byte_decode import gpu as byte_decode  # noqa: E402
from karhunen.kernels.byte_encode import gpu as byte_encode  # noqa: E402
from karhunen.kernels.scan_attention import Frames  # noqa: E402
from karhunen.kernels.scan_attention import gpu as scan_attention  # noqa: E402
from karhunen.kernels.split_attention.launch import Launch  # noqa: E402
from karhunen.kernels.triton_launch import Call  # noqa: E402

ARCHITECTURES = (80, 90, 100)
COLUMNS = ("kernel", "arch", "registers", "shared_bytes", "spills", "instructions", "tensor", "commit")
HEADINGS = (
    "kernel", "architecture", "registers", "shared memory, bytes", "spills", "instructions", "of tensor cores",
    "commit",
)  # fmt: skip
FILES = ROOT / "results/measured/gpu_kernels.json", ROOT / "docs/gpu_kernels.md"
TYPES = {
    torch.uint8: "u8", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


def calls() -> Iterator[tuple[str, Call]]:
    """Every kernel as a step launches it, by name."""
    host, t = torch.device("cpu"), 1024
    query, made = torch.randn(1, H, Q, D, dtype=torch.bfloat16), frames_of()
    for kind in KINDS:
        keys, values = (side_of(tables_of(kind), t, 1, host) for _ in range(2))
        for tile, warps in ((64, 4), (128, 8)):
            launch = Launch(tile, warps)
            _, (frames, attend, merge) = scan_attention.planned(
                query, keys, values, made, first_position=0, scale=1.0, n_splits=4, launch=launch
            )
            if (kind, tile) == ("free", 64):
                yield "frames of a query", frames
                yield "merge", merge
            yield f"attention, {kind}, tile {tile}, {warps} warps", attend
    yield from _folded_calls(query, made, host)
    yield from _other_calls(host)
    tables = tables_of("free")
    yield "encode", byte_encode.planned(torch.randn(1, H, t, D), tables, tile=32)[1]
    yield "decode", byte_decode.planned(side_of(tables, t, 1, host).codes, tables, tile=32)[1]


def _folded_calls(query: torch.Tensor, made: Frames, host: torch.device) -> Iterator[tuple[str, Call]]:
    """Scores from tables that the query is folded into."""
    keys, values = (side_of(tables_of("additive"), 1024, 1, host) for _ in range(2))
    for tile, warps in ((64, 4), (128, 8)):
        settings = {"first_position": 0, "scale": 1.0, "n_splits": 4, "launch": Launch(tile, warps), "folded": True}
        _, (_, fold, attend, _) = scan_attention.planned(query, keys, values, made, **settings)
        if tile == 64:
            yield "folding of a query", fold
        yield f"attention, additive, folded, tile {tile}, {warps} warps", attend


def _other_calls(host: torch.device) -> Iterator[tuple[str, Call]]:
    """What the layer above does not ask for: one piece of quads, joined heads, words at any address, masks, caps."""
    launch, d, sizes = Launch(64, 4), 64, SIZES[: len(SIZES) // 2]
    for kind, h, block, settings in (
        ("additive", 2, None, {"softcap": 30.0, "mask": torch.ones(1, 256, dtype=torch.bool)}),
        ("free", 1, 64, {"mask": torch.zeros(1, 256)}),
    ):
        keys, values = (side_of(tables_of(kind, h, d, sizes), 256, 1, host, gain=False) for _ in range(2))
        query, made = torch.randn(1, 2, Q, d), frames_of(2, d, block, mean=block is not None)
        _, (frames, attend, _) = scan_attention.planned(
            query, keys, values, made, first_position=3, scale=1.0, n_splits=2, launch=launch, **settings
        )
        words = ", joined heads, mask of terms" if h == 1 else ", one frame, mask of bytes, cap"
        yield f"frames of a query of {d}{words[: words.rindex(', m')]}", frames
        yield f"attention, {kind}{words}", attend


def compiled(call: Call, arch: int) -> Any:
    """The kernel for an architecture, specialized to what it is given as a launch would."""
    kernel = call.kernel
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, (parameter, given) in enumerate(zip(kernel.params, call.arguments, strict=False)):
        own: dict[tuple[int, ...], Any] = {}
        signature[parameter.name] = _type(given, (i,), own)
        attributes |= {} if parameter.do_not_specialize else own
    names = kernel.arg_names
    constants = {(names.index(name),): value for name, value in call.constants.items() if name in names}
    signature |= {names[place]: "constexpr" for (place,) in constants}
    options = {name: value for name, value in call.constants.items() if name not in names}
    source = ASTSource(kernel, signature, constants, attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _type(given: Any, path: tuple[int, ...], attributes: dict[tuple[int, ...], Any]) -> Any:
    """Triton's word for an argument; numbers and addresses that 16 divides are noted."""
    if isinstance(given, tuple):
        return type(given)(*(_type(part, (*path, i), attributes) for i, part in enumerate(given)))
    if isinstance(given, float):
        return "fp32"
    if not (given.data_ptr() if isinstance(given, torch.Tensor) else given) % 16:
        attributes[path] = [["tt.divisibility", 16]]
    return f"*{TYPES[given.dtype]}" if isinstance(given, torch.Tensor) else "i32"


def usage(made: Any) -> dict[str, int]:
    """What a compiled kernel takes, from its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(made.asm["cubin"])
        taken = _said("cuobjdump", "--dump-resource-usage", file)
        code = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", _said("nvdisasm", "-c", file), re.M)
    registers = re.search(r"REG:(\d+)", taken)
    assert registers is not None and code, "what the binary utilities print has changed"
    return {
        "registers": int(registers[1]),
        "shared_bytes": made.metadata.shared,
        "spills": sum(name in ("LDL", "STL") for name in code),
        "instructions": len(code),
        "tensor": sum("MMA" in name for name in code),
    }


def _said(program: str, *arguments: object) -> str:
    return subprocess.run([BINARIES / program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [" | ".join(str(row[name]) for name in COLUMNS) for row in rows]
    return "\n".join(f"| {line} |" for line in (" | ".join(HEADINGS), " | ".join("-" for _ in COLUMNS), *lines))


def page(found: dict[str, Any]) -> str:
    """docs/gpu_kernels.md."""
    return f"""# GPU kernels, compiled

Written by `python benchmarks/gpu_compile.py --write`, Triton {found["triton"]}, no GPU; each row on its commit.
One layer of Llama 3.1 8B; keys and values of 32 bytes a token and KV head. A program of 128 threads can hold 255
registers a thread; a multiprocessor holds 65536. `benchmarks/gpu_check.py` is to measure speed; no GPU has run it yet.

{table(found["rows"])}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kernel", default="", help="only kernels whose name has this word")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--write", action="store_true", help="into results/measured and docs")
    given = parser.parse_args()
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    commit, rows = said.strip(), []
    kept = {(row["kernel"], row["arch"]): row for row in json.loads(FILES[0].read_text(encoding="utf-8"))["rows"]}
    all_rows = []
    for name, call in calls():
        for arch in ARCHITECTURES:
            if given.kernel in name and arch in given.arch:
                rows.append({"kernel": name, "arch": f"sm_{arch}", **usage(compiled(call, arch)), "commit": commit})
                print(rows[-1], file=sys.stderr, flush=True)
                all_rows.append(rows[-1])
            elif (name, f"sm_{arch}") in kept:
                all_rows.append(kept[name, f"sm_{arch}"])
    if given.write:
        found = {"triton": triton.__version__, "rows": all_rows}
        FILES[0].write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        FILES[1].write_text(page(found), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
