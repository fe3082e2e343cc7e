"""Figures of karhunen in vLLM on SmolLM2: bytes, restored tokens, continuations, time to the first token, steps beside.

    python benchmarks/serving_vllm.py --codec CODEC            # in the environment of `make env-serving`

The unmodified engine and the engine with the connector run one after the other in this process, with one thread each.
The unmodified one answers twice, the second time with the prompts in its own prefix cache: it then rounds in another
order, and how equal it is to itself is the floor (`floor_…`).
Times are medians; reading and restoring the same prompt follow each other, so that a busy machine slows both.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)  # fmt: skip

import torch
from transformers import AutoTokenizer

from karhunen.codec import Codec
from karhunen.evaluation.documents import SPLITS, Split, encode, prose
from karhunen.hf.embedded import fetch
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm.serve import transfer_config
from karhunen.stores import DirectoryStore

BLOCK = 128


def engine(model: Path, transfer: Any, dtype: str) -> Any:
    """The unmodified engine keeps prefixes itself, which changes none of its answers; ours takes all from the store."""
    from vllm import LLM

    return LLM(
        model=str(model), dtype=dtype, enforce_eager=True, max_model_len=4608, max_num_seqs=16,
        max_num_batched_tokens=2048, disable_log_stats=False, enable_prefix_caching=transfer is None,
        distributed_executor_backend="uni", kv_transfer_config=transfer,
    )  # fmt: skip


def close(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    del llm
    ensure_kv_transfer_shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def generate(llm: Any, prompts: list[list[int]], n: int) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def first_token_seconds(llm: Any, prompt: list[int]) -> tuple[float, int]:
    """(seconds to one token of one prompt alone, tokens of it that were cached)."""
    start = time.perf_counter()
    (made,) = generate(llm, [prompt], 1)
    return time.perf_counter() - start, made.num_cached_tokens


def step_seconds(llm: Any, prompt: list[int], n_steps: int, beside: Any) -> list[float]:
    """Of decoding steps of one request; `beside` is called before each."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=n_steps + 1, ignore_eos=True)
    llm.llm_engine.add_request(str(time.perf_counter()), {"prompt_token_ids": prompt}, sampling)
    found: list[float] = []
    while llm.llm_engine.has_unfinished_requests():
        beside()
        start = time.perf_counter()
        if llm.llm_engine.step():  # steps before the prompt is restored compute nothing
            found.append(time.perf_counter() - start)
    return found[2:]


def beside(llm: Any, prompt: list[int], rounds: int, n_steps: int) -> dict[str, float]:
    """Median step with nothing beside it and with pages being coded all the time, in turns."""
    saver, half = worker()._saver, worker()
    layer = half.layers[0]
    blocks = tuple(range(1, 1 + 4 * half.plan.layout.page_tokens // layer.block_tokens))
    from karhunen.serving.vllm.saving import Copied, copies

    copied = copies(half.layers, half.plan.layout, (blocks,))
    keys = iter(range(1 << 62))

    def busy() -> None:
        if not saver._queued_bytes:
            saver.put(Copied(tuple(f"{next(keys):032x}" for _ in range(4)), 1, copied))

    idle_steps: list[float] = []
    busy_steps: list[float] = []
    for _ in range(rounds):
        saver.wait(60)
        idle_steps += step_seconds(llm, prompt, n_steps, lambda: None)
        busy_steps += step_seconds(llm, prompt, n_steps, busy)
    saver.wait(60)
    idle, with_coding = statistics.median(idle_steps), statistics.median(busy_steps)
    return {"idle_step_ms": idle * 1e3, "busy_step_ms": with_coding * 1e3, "slower": with_coding / idle - 1}


def texts(tokenizer: Any, split: Split, n: int, n_tokens: int, skip: int = 0) -> list[list[int]]:
    """Stretches of a half of the evaluation text, one after the other, round again where it ends."""
    ids = encode(tokenizer, "\n\n".join(prose(split)))
    starts = [(skip + i * n_tokens) % (len(ids) - n_tokens) for i in range(n)]
    return [ids[start : start + n_tokens] for start in starts]


def until_parting(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of equal tokens among those whose text before them is equal: one that differs ends its continuation."""
    lengths = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return sum(lengths) / sum(min(n + 1, len(a)) for n, a in zip(lengths, ours, strict=True))


def equality(ours: list[list[int]], theirs: list[list[int]], name: str = "") -> dict[str, float]:
    """How equal continuations are, token by token and as wholes."""
    pairs = [(x, y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True)]
    return {
        f"{name}equal_tokens": sum(x == y for x, y in pairs) / len(pairs),
        f"{name}equal_first_tokens": sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True)) / len(ours),
        f"{name}equal_until_parting": until_parting(ours, theirs),
        f"{name}equal_continuations": sum(a == b for a, b in zip(ours, theirs, strict=True)),
    }


def unmodified(model: Path, prompts: list[list[int]], asked: argparse.Namespace) -> list[list[list[int]]]:
    """The engine's own continuations; the same with all whole blocks of the prompts in its own prefix cache, which is
    the floor: what rounding alone makes of one engine. Read from `asked.reference` if it holds them."""
    key, kept = json.dumps([prompts, asked.new_tokens, asked.dtype]), asked.reference
    if kept is not None and kept.exists() and (found := json.loads(kept.read_text()))["asked"] == key:
        return found["tokens"]
    llm = engine(model, None, asked.dtype)
    made = [
        [list(output.outputs[0].token_ids) for output in generate(llm, prompts, asked.new_tokens)] for _ in range(2)
    ]
    close(llm)
    if kept is not None:
        kept.write_text(json.dumps({"asked": key, "tokens": made}))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--split", choices=SPLITS, default="test", help="development: to choose settings on")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="the engine's")
    parser.add_argument("--recent-tokens", type=int, help="as of `karhunen serve`")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=16, help="of each document")
    parser.add_argument("--document-tokens", type=int, default=10 * BLOCK)
    parser.add_argument("--question-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--long-prompts", type=int, default=3)
    parser.add_argument("--long-tokens", type=int, default=4096 + 16)
    parser.add_argument("--rounds", type=int, default=5, help="of steps with and without coding beside; 0: none")
    parser.add_argument("--steps", type=int, default=60, help="of each of these")
    parser.add_argument("--reference", type=Path, help="keeps the unmodified engine's answers between runs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = fetch("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = texts(tokenizer, asked.split, asked.documents, asked.document_tokens)
    skip = asked.documents * asked.document_tokens
    questions = texts(tokenizer, asked.split, asked.questions, asked.question_tokens, skip)
    short = [[*document, *question] for document in documents for question in questions]
    codec = Codec.from_pretrained(asked.codec)
    figures: dict[str, Any] = {"codec": codec.origin.recipe, "prompts": len(short), "new_tokens": asked.new_tokens}
    own, own_again = unmodified(model, short, asked)
    figures |= equality(own_again, own, "floor_")
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        settings = ServingSettings(str(asked.codec), folder, recent_tokens=asked.recent_tokens)
        llm = engine(model, transfer_config(settings), asked.dtype)
        generate(llm, short[:: asked.questions], 1)
        worker().wait()
        stored = store.n_bytes
        again = generate(llm, short, asked.new_tokens)
        whole = sum(len(ids) // BLOCK * BLOCK for ids in short)
        kept = sum(len(ids) // BLOCK * BLOCK for ids in short[:: asked.questions])
        tokens = [list(output.outputs[0].token_ids) for output in again]
        dense = sum(layer.elements_per_token for layer in codec.model.layers) * 2
        figures |= {
            "bytes_of_bf16": stored / (kept * dense),
            "blocks_served": sum(output.num_cached_tokens for output in again) / whole,
            **equality(tokens, own),
        }
        print(json.dumps(figures), flush=True)
        reading: list[float] = []
        restoring: list[float] = []
        before = store.n_bytes
        for prompt in texts(tokenizer, asked.split, asked.long_prompts, asked.long_tokens, skip=7):
            reading.append(first_token_seconds(llm, prompt)[0])
            worker().wait()
            seconds, n_cached = first_token_seconds(llm, prompt)
            restoring.append(seconds)
            figures["long_blocks_served"] = n_cached / (len(prompt) // BLOCK * BLOCK)
        if reading:
            n_long = asked.long_prompts * (asked.long_tokens // BLOCK * BLOCK)
            figures |= {
                "long_bytes_of_bf16": (store.n_bytes - before) / (n_long * dense),
                "reading_s": statistics.median(reading),
                "restoring_s": statistics.median(restoring),
                "restoring_of_reading": statistics.median(b / a for a, b in zip(reading, restoring, strict=True)),
            }
        if asked.rounds:
            figures |= beside(llm, short[0], asked.rounds, asked.steps)
        print(json.dumps(figures), flush=True)
        close(llm)


if __name__ == "__main__":
    main()
