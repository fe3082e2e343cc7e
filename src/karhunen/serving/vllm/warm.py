"""Prompts into a store before anyone asks: the engine reads each once and its pages are kept."""

import time
from collections.abc import Sequence
from typing import Any

from karhunen.hf.embedded import MODELS, fetch
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm.serve import transfer_config
from karhunen.stores import Store

QUIET_SECONDS = 5.0  # without a new page: nothing waits to be coded any more
LONGEST_SECONDS = 600.0


def warm(model: str, settings: ServingSettings, prompts: Sequence[str], chat: bool, **engine: Any) -> int:
    """How many pages were added. `chat`: each prompt is a system message, in the model's own template.

    The engine compiles nothing unless `engine` says so: each prompt is read once.
    """
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

    store = settings.open_store()
    before = len(store.keys())
    name = str(fetch(model)) if model in MODELS else model
    llm: Any = LLM(model=name, kv_transfer_config=transfer_config(settings), **{"enforce_eager": True, **engine})
    texts = [_as_system(llm, prompt) for prompt in prompts] if chat else list(prompts)
    llm.generate(texts, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    return wait_until_quiet(store) - before


def wait_until_quiet(store: Store, quiet: float = QUIET_SECONDS, longest: float = LONGEST_SECONDS) -> int:
    """How many pages there are once no more come."""
    start = last = time.perf_counter()
    n_pages = len(list(store.keys()))
    while time.perf_counter() - last < quiet and time.perf_counter() - start < longest:
        time.sleep(0.2)
        if (now := len(list(store.keys()))) != n_pages:
            n_pages, last = now, time.perf_counter()
    return n_pages


def _as_system(llm: Any, prompt: str) -> str:
    tokenizer = llm.get_tokenizer()
    return str(tokenizer.apply_chat_template([{"role": "system", "content": prompt}], tokenize=False))
