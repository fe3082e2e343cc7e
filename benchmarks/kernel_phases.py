"""Where a decode step's time goes: each phase of attention from bytes on its own, one layer, one thread.

Nanoseconds per coded token and KV head, at about 8 times fewer bytes; the least of several runs, tables in cache. What
the whole call takes beyond the sum is Python, torch and tables that are not in cache.

    python benchmarks/kernel_phases.py --shape 3x3x64 --tokens 16384 --json results/measured/speed/phases.json
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from numba import njit

from karhunen.attention import fused
from karhunen.attention.reader import reader_of
from karhunen.evaluation.kernel_speed import BLOCK_TOKENS, Shape, made_up_codec, made_up_layer
from karhunen.evaluation.provenance import provenance
from karhunen.kernels.byte_attention import (
    CodedTokens,
    byte_attention,
    cpu_direct,
    cpu_inputs,
    cpu_scores,
    cpu_softmax,
    cpu_values,
)
from karhunen.kernels.byte_attention.inputs import row_lanes
from karhunen.kernels.simd import ROWS
from karhunen.monitoring.allocator import keep_freed_memory

SPAN = cpu_inputs.SPAN


@njit(nogil=True)
def direct(rows, problem, side, scratch, n):
    """Scores of n spans, block by block."""
    for span in range(n):
        for block in range(SPAN // BLOCK_TOKENS):
            start = span * SPAN + block * BLOCK_TOKENS
            at = span * (SPAN // BLOCK_TOKENS) + block
            out = block * BLOCK_TOKENS * len(rows)
            cpu_direct.score_direct(rows, problem, side, 0, 0, 0, at, start, start + BLOCK_TOKENS, scratch.scores, out)


@njit(nogil=True)
def folded(rows, problem, side, scratch, n):
    """Scores of n spans by look-ups alone."""
    for span in range(n):
        cpu_scores.score_folded(rows, side, 0, 0, span * SPAN, span * SPAN + SPAN, scratch.folded, scratch.scores, 0)


@njit(nogil=True)
def fold(rows, problem, side, scratch, n):
    """Tables of entries' products, once a span."""
    for _ in range(n):
        cpu_scores.fold(rows, side.tables, 0, scratch.query, scratch.folded)


@njit(nogil=True)
def softmax(rows, problem, side, scratch, n):
    """Scale, reference and weights of n spans."""
    for _ in range(n):
        cpu_scores.scale(rows, scratch.gains, 0, SPAN, scratch.bias, scratch.scores, 0)
        cpu_softmax.move_reference(len(rows), scratch.scores, SPAN * len(rows), scratch.histogram, scratch)
        cpu_softmax.weigh_tokens(rows, SPAN * len(rows), scratch)


@njit(nogil=True)
def count(rows, problem, side, scratch, n):
    """Histograms of n spans."""
    for span in range(n):
        cpu_values.count(rows, side, 0, 0, span * SPAN, span * SPAN + SPAN, scratch.scores, scratch.histogram)


@njit(nogil=True)
def weigh_entries(rows, problem, side, scratch, n):
    """Histograms times tables, once a span; a call does it once a head."""
    for _ in range(n):
        cpu_values.weigh_entries(rows, side.tables, 0, scratch)


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="KV heads x query heads of each x head size; repeatable")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = [measured(Shape.parse(text), given.tokens) for text in given.shape or ("3x3x64", "8x4x128", "8x1x128")]
    for row in rows:
        print(f"{row['shape']}, {given.tokens:,} tokens")
        for name, value in row["nanoseconds_per_token_and_head"].items():
            print(f"  {name:42} {value:7.2f}")
    if given.json:
        body = {"tokens": given.tokens, "rows": rows, "made": asdict(provenance())}
        given.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def measured(shape: Shape, n_tokens: int) -> dict[str, Any]:
    """Every phase of one shape."""
    generator = torch.Generator().manual_seed(0)
    codec = made_up_codec(shape, 2.0, generator)
    held = made_up_layer(codec, shape, n_tokens, 1, generator)
    reader = reader_of(codec, held)
    query = torch.randn(1, shape.h * shape.q, 1, shape.d, generator=generator)
    assert held.packed is not None and reader.frames is not None, "tokens are coded"
    assert reader.key is not None and reader.value is not None, "they are read from bytes"
    keys = CodedTokens(held.packed["key"].planes, reader.key.tables)
    values = CodedTokens(held.packed["value"].planes, reader.value.tables)
    n_blocks = (held.n_coded + 4 - 1) // BLOCK_TOKENS + 1
    grouped = query.view(1, shape.h, shape.q, shape.d)
    frames = reader.frames

    def make_frames() -> tuple[torch.Tensor, torch.Tensor]:
        laid_out, blocks = frames.lay_out(grouped), frames.blocks(0, n_blocks, torch.float32)
        bias = (blocks @ laid_out.bias).unflatten(-1, (BLOCK_TOKENS, -1))[..., : shape.q].permute(0, 1, 4, 2, 3)
        return blocks @ laid_out.queries, bias

    with torch.inference_mode():
        queries, bias = make_frames()
        terms: dict[str, Any] = {"offset_bias": bias, "block_tokens": BLOCK_TOKENS, "first_offset": 4, "scale": 0.1}
        n = held.n_coded // SPAN
        each = 1e9 / (held.n_coded * shape.h)  # of a second for the whole layer
        span = 1e9 / (n * SPAN)  # of a second for n spans of one head
        run = phases(shape, keys, values, queries, n)
        found = {
            "whole call (frames, kernel, exact window, merge)": each
            * least(lambda: fused.attend(reader, held, query, scale=0.1)),
            "frames of the query": each * least(make_frames),
            "kernel": each * least(lambda: byte_attention(queries, keys, values, path="cpu", **terms)),
            **{f"  {name}": span * least(lambda call=call: call()) for name, call in run.items()},
        }
    return {"shape": str(shape), "nanoseconds_per_token_and_head": found}


def phases(
    shape: Shape, keys: CodedTokens, values: CodedTokens, queries: torch.Tensor, n: int
) -> dict[str, Callable[[], None]]:
    """The kernel's phases on one head's bytes, ready to run over n spans."""
    key, value = cpu_inputs.side_of(keys), cpu_inputs.side_of(values)
    rows = ROWS[min(row_lanes(shape.q), 8)]
    scratch = cpu_inputs.scratch_of(len(rows), key.tables, value.tables, True)
    for array in scratch:
        array[:] = 0.5
    frames, stride = cpu_inputs.frames_of(queries, keys.tables)
    problem = cpu_inputs.Problem(
        h=shape.h, q=shape.q, t=keys.n_tokens, n=queries.shape[3], c=queries.shape[4], c_value=shape.d, n_chunks=1,
        n_splits=1, block_tokens=BLOCK_TOKENS, first_offset=0, folded=False, scale=0.1, softcap=0.0, q_frames=frames,
        q_frame_stride=stride, key_bias=cpu_inputs.NOTHING, offset_bias=cpu_inputs.NOTHING, offset_bias_rows=0,
        mask=cpu_inputs.NOTHING, first_visible=cpu_inputs.NO_INDICES,
    )  # fmt: skip
    calls = {
        "scores, direct": (direct, key),
        "scores, folded: look-ups": (folded, key),
        "scores, folded: tables, once a span": (fold, key),
        "softmax": (softmax, key),
        "values: histograms": (count, value),
        "values: histograms times tables, once a span": (weigh_entries, value),
    }
    return {
        name: lambda call=call, side=side: call(rows, problem, side, scratch, n) for name, (call, side) in calls.items()
    }


def least(call: Callable[[], object], rounds: int = 15) -> float:
    """Seconds of the quickest of several runs, compiled before."""
    call()
    found: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    main()
