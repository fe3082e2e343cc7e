"""Run in a process of its own: engines one after the other, asked what a JSON on stdin says; JSON lines on stdout.

    [{"name": …, "model": …, "transfer": {…} | null, "engine": {…}, "steps": [{"prompts": [[ids] …], "max_tokens": n}]}]

An engine's line is {"name", "steps": [answers of each prompt], "metrics"} or {"name", "error"}. Between steps all that
was computed is stored. The engine runs inside this process, so that its libraries are loaded once for all engines.
"""

import gc
import json
import os
import sys
import time
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)  # fmt: skip

SETTINGS = {
    "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 12, "disable_log_stats": False,
    "enable_prefix_caching": False, "distributed_executor_backend": "uni",
}  # fmt: skip


def main() -> None:
    for asked in json.loads(sys.stdin.read()):
        start = time.perf_counter()
        try:
            answer = run(asked)
        except Exception as error:  # noqa: BLE001  # it is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer |= {"name": asked["name"], "seconds": round(time.perf_counter() - start, 1)}
        sys.stdout.write(f"ANSWER {json.dumps(answer)}\n")
        sys.stdout.flush()
        clean_up()


def run(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(model=asked["model"], kv_transfer_config=asked["transfer"], **{**SETTINGS, **asked.get("engine", {})})
    steps: list[Any] = []
    for step in asked["steps"]:
        sampling = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 16), ignore_eos=True, logprobs=1)
        made = llm.generate([{"prompt_token_ids": ids} for ids in step["prompts"]], sampling, use_tqdm=False)
        steps.append([answer_of(output) for output in made])
        if asked["transfer"] is not None:
            connector()._worker.wait(120)
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if "karhunen" in metric.name:
            found[metric.name.removeprefix("vllm:karhunen_")] = getattr(metric, "value", getattr(metric, "count", None))
    return {"steps": steps, "metrics": found}


def answer_of(output: Any) -> dict[str, Any]:
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens,
        "logprob": output.outputs[0].cumulative_logprob,
        "first_token_seconds": output.metrics.first_token_latency if output.metrics else None,
    }


def connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
