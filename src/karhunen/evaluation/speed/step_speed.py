"""One decode step of a model: from a compressed cache read from its bytes, against transformers' dense caches.

exact prefill once ─▶ the same keys and values into each cache ─▶ steps in turn ─▶ ms, speed-up; KL of the codec
"""

import time
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.device import wait_for
from karhunen.evaluation.scores.score import Document, run_dense, score
from karhunen.evaluation.speed.measured import Timings
from karhunen.hf.cache import CompressedCache, dense_cache, static_cache
from karhunen.hf.probe import cache_argument, input_device

PREFILL_TOKENS = 1024  # of a forward; bounds the memory of prefill
KL_PROMPT, KL_SCORED = 512, 64
DENSE = ("dynamic", "static")


def measure(model: Any, codec: Codec, tokens: Int[Tensor, " t"], rounds: int) -> dict[str, Any]:
    """A JSON row for the given context, timed where the model lies; its attention implementation is put back at the
    end."""
    before = model.config._attn_implementation
    try:
        return _measure(model, codec, tokens, rounds)
    finally:
        model.set_attn_implementation(before)


def _measure(model: Any, codec: Codec, tokens: Tensor, rounds: int) -> dict[str, Any]:
    name, n, device = cache_argument(model), len(tokens), input_device(model)
    tokens = tokens.to(device)
    caches: dict[str, Any] = {
        "dynamic": dense_cache(model),
        "static": static_cache(model, n + rounds + 2),
        "bytes": CompressedCache(model, codec),
    }
    with torch.inference_mode():
        wait_for(device)
        start = time.perf_counter()
        _forward(model, name, caches["dynamic"], tokens)
        wait_for(device)
        prefill_ms = 1e3 * (time.perf_counter() - start)
        filled = [(layer.keys, layer.values) for layer in caches["dynamic"].layers]
        start = time.perf_counter()
        for index, (key, value) in enumerate(filled):
            caches["bytes"].update(key, value, index)
        wait_for(device)
        encode_ms = 1e3 * (time.perf_counter() - start)
        for index, (key, value) in enumerate(filled):
            caches["static"].update(key, value, index)

        def step(which: str) -> None:
            model.set_attn_implementation("karhunen" if which == "bytes" else "sdpa")
            at = torch.tensor([[int(caches[which].get_seq_length())]], device=tokens.device)
            model(input_ids=tokens[None, -1:], use_cache=True, position_ids=at, **{name: caches[which]})

        timings = Timings.of({which: lambda which=which: step(which) for which in caches}, rounds, device)
        report = caches["bytes"].report()
        caches["bytes"].close()
    fastest = timings.fastest(*DENSE)
    return {
        "tokens": n,
        "milliseconds": {which: timings.median(which) for which in caches},
        "tokens_per_second": {which: 1e3 / timings.median(which) for which in caches},
        "fastest_dense": fastest,
        "speed_up": timings.speed_up("bytes", fastest),
        "speed_up_dynamic": timings.speed_up("bytes", "dynamic"),
        "speed_up_static": timings.speed_up("bytes", "static"),
        "bits_per_element": report.total.bits_per_element,
        "bytes_read": report.total.held,
        "dense_bytes_read": report.total.dense,
        "encode_microseconds_per_token": 1e3 * encode_ms / n,
        "encode_share_of_prefill": encode_ms / prefill_ms,
        "how_read": sorted({row.how_read for row in report.layers if row.n_coded}),
        "kl": codec_kl(model, codec, tokens),
    }


def codec_kl(model: nn.Module, codec: Codec, tokens: Int[Tensor, " t"]) -> float | None:
    """Mean logit KL, nats, of a short continuation read from the coded cache; None where the text is too short."""
    if len(tokens) < KL_PROMPT + KL_SCORED:
        return None
    document = Document("speed", tokens[: KL_PROMPT + KL_SCORED], KL_PROMPT)
    return float(score(model, codec, run_dense(model, document)).kl.mean())


def _forward(model: Any, name: str, cache: Any, tokens: Tensor) -> None:
    model.set_attn_implementation("sdpa")
    for start in range(0, len(tokens), PREFILL_TOKENS):
        part = tokens[None, start : start + PREFILL_TOKENS]
        model(input_ids=part, use_cache=True, logits_to_keep=1, **{name: cache})
