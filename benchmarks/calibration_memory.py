"""What calibration holds in memory, by model, recipe and devices: the table of docs/large-models.md.

    python -m benchmarks.calibration_memory             # prints it; nothing is loaded, shapes alone are needed
    python -m benchmarks.calibration_memory --measure   # SmolLM2's backward pass here, with and without what it keeps

Shapes are those of Llama 3.2 1B, Llama 3.1 8B and 70B, and Gemma 3 27B, in bfloat16; 16,384 tokens of text in sequences
of 2,048. Columns 4 to 6 are of the fullest device; the last one is how many sequences run at a time.
"""

import argparse
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import transformers as tf
from tests.allocations import peak_bytes

from karhunen import recipes
from karhunen.byte_sizes import said_bytes
from karhunen.calibration.memory import Work
from karhunen.calibration.memory_plan import MemoryPlan
from karhunen.calibration.placement import place
from karhunen.hf import gradients
from karhunen.hf.embedded import load

GB = 10**9
LLAMA: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
GEMMA: dict[str, Any] = {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208, "max_position_embeddings": 131072,
}  # fmt: skip


def llama(hidden: int, mlp: int, layers: int, heads: int, **more: Any) -> tf.LlamaConfig:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return tf.LlamaConfig(**LLAMA, **sizes, **more)


MODELS: dict[str, Any] = {
    "Llama 3.2 1B": llama(2048, 8192, 16, 32, tie_word_embeddings=True),
    "Llama 3.1 8B": llama(4096, 14336, 32, 32),
    "Gemma 3 27B": tf.Gemma3TextConfig(**GEMMA),
    "Llama 3.1 70B": llama(8192, 28672, 80, 64),
}
ROWS = (
    ("Llama 3.2 1B", "karhunen", 1, 8),
    ("Llama 3.1 8B", "karhunen", 1, 24),
    ("Llama 3.1 8B", "nova_kv", 1, 24),
    ("Llama 3.1 8B", "spectra", 1, 24),
    ("Gemma 3 27B", "karhunen", 1, 80),
    ("Gemma 3 27B", "karhunen", 4, 24),
    ("Llama 3.1 70B", "karhunen", 8, 24),
    ("Llama 3.1 70B", "karhunen", 2, 80),
)


def planned(name: str, recipe: str, n_devices: int, gigabytes: int) -> MemoryPlan:
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16)
    devices = tuple(f"cuda:{i}" for i in range(n_devices))
    work = Work(tuple(recipes.make(recipe).needs()), (), 16384, 2048)
    return place(model, devices, work, dict.fromkeys(devices, gigabytes * GB), None).plan


def measure(n_tokens: int = 1024) -> None:
    """Bytes that the allocator records beside the weights, and seconds of one thread, of one sequence's gradients."""
    torch.set_num_threads(1)
    model, _ = load("smollm2")
    tokens = torch.randint(100, 40000, (n_tokens,), generator=torch.Generator().manual_seed(0))

    def backward() -> None:
        gradients.read_gradients(model, tokens, 0, lambda *_: None)

    def seconds() -> float:
        start = time.process_time()
        backward()
        return time.process_time() - start

    backward()
    print("| inside of layers | held at the peak | seconds, best of 2 |")
    print("|---|--:|--:|")
    for name, kept in (("runs twice", False), ("is kept", True)):
        with mock.patch.object(gradients, "checkpointed", return_value=nullcontext()) if kept else nullcontext():
            print(f"| {name} | {said_bytes(peak_bytes(backward))} | {min(seconds(), seconds()):.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true", help="run SmolLM2's backward pass here")
    if parser.parse_args().measure:
        measure()
        return
    columns = "model", "recipe", "devices", "weights", "to work in", "at the peak", "statistics, host", "at a time"
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for name, recipe, n_devices, gigabytes in ROWS:
        plan = planned(name, recipe, n_devices, gigabytes)
        *cards, host = plan.devices
        fullest = max(cards, key=lambda card: card.peak)
        cells = [said_bytes(n) for n in (fullest.weights, fullest.working, fullest.peak, host.statistics)]
        print(f"| {name} | `{recipe}` | {len(cards)} × {gigabytes} GB | {' | '.join(cells)} | {plan.work.batch} |")


if __name__ == "__main__":
    main()
