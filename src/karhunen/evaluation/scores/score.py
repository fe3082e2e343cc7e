"""Decode-style scoring: the prompt is read exactly, then tokens are scored that read the coded cache.

    prefill exact ─▶ tokens leave the window and are coded ─▶ scored tokens attend to coded + exact tokens
    KL = Σ_v p_dense(v) log(p_dense(v) / p_coded(v)), per scored token, in nats

The scored text is fed a page at a time: within a page every token is younger than the window, so its logits are those
of feeding one token at a time. The dense run is fed in the same pages, so that `full` scores exactly 0.
With `chunk_tokens` the prompt is read in chunks too, each of which reads the coded tokens before it.
"""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.evaluation.scores.on_disk import on_disk
from karhunen.hf.cache import CompressedCache, dense_cache
from karhunen.hf.probe import cache_argument, inference
from karhunen.store.report import Report

Tick = Callable[[int], None]
"""Told how many more tokens were read."""

PAGE_TOKENS = 16  # tokens scored in one forward; at most the page by which tokens leave the window


@final
@dataclass(frozen=True)
class Document:
    """A text to score: `prefill_tokens` are read exactly, the rest is scored."""

    name: str
    tokens: Int[Tensor, " n"]
    prefill_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.prefill_tokens < len(self.tokens):
            raise ValueError(
                f"{self.name}: a prefill of {self.prefill_tokens} of {len(self.tokens)} tokens leaves nothing to score"
            )

    @property
    def scored(self) -> Int[Tensor, " m"]:
        """Tokens that are fed while reading the coded cache."""
        return self.tokens[self.prefill_tokens :]


@final
@dataclass(frozen=True)
class DenseRun:
    """The uncompressed model on a document: its cache after the prefill, and its logits on the scored tokens, which
    may lie in a file (`on_disk`): they are vocabulary times tokens, more than the cache."""

    document: Document
    cache: Any
    logits: Float[Tensor, "m v"]
    seconds_per_token: float
    chunk_tokens: int | None = None


@final
@dataclass(frozen=True)
class Score:
    """One codec on one document. Per scored token: KL in nats, whether the most likely next token is the dense run's,
    and the negative log-likelihood of the true next token under both (the last token has none).

    `decode_seconds` is what decoding the whole prompt once takes, in all layers: what each step pays that does not read
    bytes. While scoring, decoded tokens are kept, and only new ones are decoded.
    """

    document: str
    kl: Float[Tensor, " m"]
    agree: Bool[Tensor, " m"]
    nll_dense: Float[Tensor, " m-1"]
    nll_coded: Float[Tensor, " m-1"]
    report: Report
    encode_seconds: float
    decode_seconds: float
    dense_seconds_per_token: float


def run_dense(
    model: nn.Module, document: Document, chunk_tokens: int | None = None, tick: Tick = lambda _: None
) -> DenseRun:
    """Prefill once, in chunks if so asked, then score the dense model page by page."""
    with inference(model):
        cache = dense_cache(model)
        _prefill(model, document, cache, chunk_tokens)
        tick(document.prefill_tokens)
        after_prefill = deepcopy(cache)
        taken: list[float] = []
        logits = on_disk(_timed(model, page, cache, taken, tick) for page in _pages(document.scored))
    return DenseRun(document, after_prefill, logits, sum(taken) / len(document.scored), chunk_tokens)


def score(model: nn.Module, codec: Codec, dense: DenseRun, tick: Tick = lambda _: None) -> Score:
    """Score `codec` against the dense run; the exact prefill is taken from it and coded here. If that was read in
    chunks, this cache reads the prompt itself, in the same chunks."""
    with inference(model):
        start = time.perf_counter()
        if dense.chunk_tokens is None:
            cache = coded_copy(model, codec, dense.document.tokens[: dense.document.prefill_tokens], dense.cache)
        else:
            cache = CompressedCache(model, codec, keep_decoded=True)
            _prefill(model, dense.document, cache, dense.chunk_tokens)
        encoded = time.perf_counter()
        _read_all(cache)
        decoded = time.perf_counter()
        kl, agree, nll_dense, nll_coded = compared_with(model, dense, cache, tick)
    return Score(
        document=dense.document.name,
        kl=kl,
        agree=agree,
        nll_dense=nll_dense,
        nll_coded=nll_coded,
        report=cache.report(),
        encode_seconds=encoded - start,
        decode_seconds=decoded - encoded,
        dense_seconds_per_token=dense.seconds_per_token,
    )


def compared_with(
    model: nn.Module, dense: DenseRun, cache: Any, tick: Tick = lambda _: None
) -> tuple[Float[Tensor, " m"], Bool[Tensor, " m"], Float[Tensor, " m-1"], Float[Tensor, " m-1"]]:
    """KL, agreement and both likelihoods of the scored tokens, read after whatever `cache` holds of the prompt."""
    scored = dense.document.scored
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for page in (slice(at, at + PAGE_TOKENS) for at in range(0, len(scored), PAGE_TOKENS)):
        parts.append(_compared(dense.logits[page], _forward(model, scored[page], cache), scored[1:][page]))
        tick(len(scored[page]))
    kl, agree, nll_dense, nll_coded = (torch.cat(values) for values in zip(*parts, strict=True))
    return kl, agree, nll_dense, nll_coded


def coded_copy(model: nn.Module, codec: Codec, tokens: Int[Tensor, " n"], uncompressed: Any) -> CompressedCache:
    """A compressed cache that was handed the dense cache of `tokens` at once; other layers are copies. A window that
    looks at queries has to read the tokens itself. Decoded tokens are kept, since the copy is read many times."""
    cache = CompressedCache(model, codec, keep_decoded=True)
    if codec.window.reads != "never":
        _forward(model, tokens, cache, keep=1)
        return cache
    layers: list[Any] = cache.layers
    for index, layer in enumerate(uncompressed.layers):
        if index in codec.windowed:
            layers[index].update(layer.keys, layer.values)
        else:
            layers[index] = deepcopy(layer)
    return cache


def _timed(model: nn.Module, page: Tensor, cache: Any, taken: list[float], tick: Tick) -> Float[Tensor, "t v"]:
    start = time.perf_counter()
    logits = _forward(model, page, cache)
    taken.append(time.perf_counter() - start)
    tick(len(page))
    return logits


def _compared(
    dense: Float[Tensor, "t v"], coded: Float[Tensor, "t v"], truth: Int[Tensor, " u"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL, whether both say the same, and the likelihoods of the true next tokens, as far as there are any."""
    p, q = dense.to(coded.device).float().log_softmax(-1), coded.float().log_softmax(-1)
    at = truth[:, None].to(p.device)
    return (
        (p.exp() * (p - q)).sum(-1).clamp_min(0),
        p.argmax(-1) == q.argmax(-1),
        -p[: len(truth)].gather(-1, at).squeeze(-1),
        -q[: len(truth)].gather(-1, at).squeeze(-1),
    )


def _read_all(cache: CompressedCache) -> None:
    for layer in cache.coded_layers():
        layer.store.read()


def _prefill(model: nn.Module, document: Document, cache: Any, chunk_tokens: int | None) -> None:
    for chunk in document.tokens[: document.prefill_tokens].split(chunk_tokens or document.prefill_tokens):
        _forward(model, chunk, cache, keep=1)


def _pages(tokens: Int[Tensor, " m"]) -> Iterator[Tensor]:
    yield from tokens.split(PAGE_TOKENS)


def _forward(model: nn.Module, tokens: Tensor, cache: Any, keep: int = 0) -> Float[Tensor, "t v"]:
    device = next(model.parameters()).device
    arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": keep}
    return cast("Any", model)(input_ids=tokens[None].to(device), **arguments).logits[0]
