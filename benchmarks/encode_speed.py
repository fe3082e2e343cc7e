"""How fast each recipe turns vectors into bytes: tokens per second of one layer of 3 heads × 64, on one thread.

    python benchmarks/encode_speed.py                    every recipe, a table
    python benchmarks/encode_speed.py nova_kv spectra    these
    ... --json                                           one JSON document, with the commit it was run on

Keys and values of a token are both coded: a token counts once. Vectors are correlated Gaussians; speed does not depend
on them. Time is the process's own processor time, which other programs on the machine do not lengthen by waiting; the
wall clock's rate stands beside it. The goal is at least 5,000 tokens/s for nova_kv.
"""

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path
from statistics import median

import torch

from karhunen import recipes
from karhunen.codec import LayerCodec
from karhunen.fitting import fit
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need, Statistic
from karhunen.statistics.rotary import Rotary
from karhunen.statistics.samples import Samples

N_HEADS, HEAD_DIM, N_SAMPLES = 3, 64, 4096
GOAL_TOKENS_PER_SECOND = {"nova_kv": 5000}


def vectors(n_tokens: int, seed: int) -> torch.Tensor:
    """[h t d] with a spectrum that falls by 30 dB."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -1.5, HEAD_DIM)
    mix = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(0)))[0]
    return (torch.randn(N_HEADS, n_tokens, HEAD_DIM, generator=generator) * scale) @ mix


def statistic(need: Need) -> Statistic:
    x = vectors(N_SAMPLES, seed=1)
    x = x.transpose(0, 1).flatten(1)[None] if need.joined else x
    return Samples.of(x) if need.kind == "samples" else Moments.of(x)


def layer_codec(text: str) -> LayerCodec | None:
    """The codec of one layer; None for a recipe that codes nothing."""
    recipe = recipes.make(text)
    shape = LayerShape("full", N_HEADS, 3 * N_HEADS, HEAD_DIM, HEAD_DIM)
    rotary = Rotary(10000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    measured = {need: statistic(need) for need in recipe.needs()}
    layer = LayerStatistics(rotary, None, HEAD_DIM**-0.5, N_SAMPLES, measured)
    codec = fit(recipe, Statistics(ModelIdentity("synthetic", "", "", (shape,)), {0: layer}))
    return codec.layers.get(0)


def measure(codec: LayerCodec, n_tokens: int, n_runs: int) -> tuple[float, float]:
    """Tokens per second of processor time and of the wall clock: medians over runs after one that is not counted."""
    key, value = vectors(n_tokens, seed=2)[None], vectors(n_tokens, seed=3)[None]
    positions = torch.arange(n_tokens)[None]
    busy: list[float] = []
    wall: list[float] = []
    for _ in range(n_runs + 1):
        start = time.process_time(), time.perf_counter()
        codec.key.encode(key, positions)
        codec.value.encode(value, positions)
        busy.append(time.process_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return n_tokens / median(busy[1:]), n_tokens / median(wall[1:])


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="encode tokens per second, one layer, one thread")
    parser.add_argument("recipes", nargs="*", help="recipes with options; all at their nominal ones by default")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    met = True
    for text in arguments.recipes or recipes.names():
        codec = layer_codec(text)
        if codec is None:
            continue
        speed, wall = measure(codec, arguments.tokens, arguments.runs)
        goal = GOAL_TOKENS_PER_SECOND.get(text)
        met = met and (goal is None or speed >= goal)
        rows.append({"recipe": text, "tokens_per_second": round(speed), "wall": round(wall), "goal": goal})
        if not arguments.json:
            aim = f"   goal {goal:,}" if goal else ""
            print(f"{text:<24}{speed:>12,.0f} tokens/s{wall:>12,.0f} by the clock{aim}", flush=True)
    if arguments.json:
        what = {"layer": f"{N_HEADS} heads x {HEAD_DIM}", "tokens": arguments.tokens, "threads": 1}
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        print(json.dumps({"commit": commit(), **what, **machine, "rows": rows}, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
