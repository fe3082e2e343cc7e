"""Before a codec is adopted: is it good enough, does it hold what was planned, how long is a step, what stays exact?

report card (or `verify`) ─▶ quality gate          ┐
a real cache of N tokens  ─▶ measured ÷ planned    ├─▶ lines, each passed or failed with its reason
steps in turn             ─▶ against dense          │
the codec                 ─▶ what stays exact       ┘
"""

from dataclasses import dataclass
from math import inf
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.evaluation.speed.step_speed import measure
from karhunen.evaluation.verify import Part, Size, verify
from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument, inference, input_device
from karhunen.planning.price import said_window, side_bytes, split_of
from karhunen.planning.rate import Rate
from karhunen.planning.shape import CacheLayer, ModelShape
from karhunen.statistics.need import SLOTS
from karhunen.store.report import Report

ROUNDS = 5
PREFILL_TOKENS = 512  # of a forward; bounds the memory of prefill


@final
@dataclass(frozen=True)
class Tolerance:
    """How far measured bytes may be from planned ones, as a share; how long a step may take, against the fastest dense
    cache's."""

    bytes: float = 0.03
    step: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.bytes < inf and 0 < self.step < inf):
            raise ValueError(f"bytes={self.bytes}, step={self.step}: a share of 0 or more, and a ratio above 0")


@final
@dataclass(frozen=True)
class Line:
    """One line of the list."""

    name: str
    passed: bool
    said: str


def check_list(
    model: Any,
    tokenizer: Any,
    codec: Codec,
    shape: ModelShape,
    tokens: Int[Tensor, " t"],
    *,
    tolerance: Tolerance | None = None,
    part: Part | None = None,
) -> list[Line]:
    """Every line; ValueError if the codec was made for another model. A codec without a report card is verified first,
    quickly. `tokens` fill the cache that is measured and timed."""
    tolerance = tolerance or Tolerance()
    if codec.card is None:
        more: dict[str, Any] = {} if part is None else {"part": part}
        codec = verify(model, tokenizer, codec, size=Size().quickly, **more)
    card = codec.card
    assert card is not None, "verify makes a card"
    lines = [Line("quality", card.passed, card.line)]
    report = real_report(model, codec, tokens)
    lines += [_planned_layers(shape, codec), _memory(report, codec, len(tokens), tolerance)]
    lines.append(_coded(report))
    timed = measure(model, codec, tokens, ROUNDS)
    share = 1 / timed["speed_up"]
    said = f"{timed['milliseconds']['bytes']:.2f} ms from bytes, {share:.2f} of the {timed['fastest_dense']} cache's"
    read = f"{said} {timed['milliseconds'][timed['fastest_dense']]:.2f} ms; {', '.join(timed['how_read'])}"
    lines.append(Line("step time", share <= tolerance.step, f"{read} (≤ {tolerance.step:g})"))
    return [*lines, *_exact(codec, report)]


def real_report(model: nn.Module, codec: Codec, tokens: Int[Tensor, " t"]) -> Report:
    """What a compressed cache holds after the model has read `tokens`."""
    cache = CompressedCache(model, codec)
    name, tokens = cache_argument(model), tokens.to(input_device(model))
    with inference(model):
        for start in range(0, len(tokens), PREFILL_TOKENS):
            model(input_ids=tokens[None, start : start + PREFILL_TOKENS], use_cache=True, **{name: cache})
    report = cache.report()
    cache.close()
    return report


def rate_of_codec(codec: Codec, exact_bits: float) -> Rate:
    """The rate of a fitted codec: bits of its own sides, the exact tokens that its rules set aside included. Layers are
    named by their shape, so those alike have the mean of their bits."""
    found: dict[CacheLayer, list[float]] = {}
    granule = 1
    for index, layer in codec.layers.items():
        of = codec.model.layers[index]
        dims = {"key": of.key_dim, "value": of.value_dim}
        n_bytes = sum(side_bytes(layer.side(slot), dims[slot]) for slot in SLOTS)
        share = (layer.exceptions.share or 0.0) if layer.exceptions else 0.0
        found.setdefault(cache_layer(codec, index), []).append(8 * n_bytes / of.elements_per_token + exact_bits * share)
        granule = layer.granule_tokens
    bits = {layer: sum(every) / len(every) for layer, every in found.items()}
    name = codec.origin.recipe or "codec"
    return Rate(name, bits, split_of(codec.window, granule), said_window(codec.window), granule)


def cache_layer(codec: Codec, index: int) -> CacheLayer:
    """A coded layer as planning sees it."""
    of = codec.model.layers[index]
    return CacheLayer("full", of.n_kv_heads, of.n_query_heads, of.key_dim, of.value_dim)


def _memory(report: Report, codec: Codec, n_tokens: int, tolerance: Tolerance) -> Line:
    """Of the coded layers, planned from the codec's own bits."""
    name = "memory of coded layers"
    if not codec.layers:
        return Line(name, False, "the codec codes no layer")
    bits = 8.0 * report.total.dense / report.total.n_elements
    rate = rate_of_codec(codec, bits)
    planned = sum(rate.layer_bytes(cache_layer(codec, index), n_tokens, bits) for index in codec.layers)
    held = report.coded.held
    off = held / planned - 1
    said = f"{held:,} bytes measured, {planned:,.0f} planned ({off:+.1%}, within {tolerance.bytes:.0%})"
    return Line(name, abs(off) <= tolerance.bytes, said)


def _planned_layers(shape: ModelShape, codec: Codec) -> Line:
    """Whether the plan counts the layers that the model itself has, each with its sizes."""
    planned = sorted((x.n_kv_heads, x.key_dim, x.value_dim) for x in shape.layers if x.elements_per_token)
    real = sorted((x.n_kv_heads, x.key_dim, x.value_dim) for x in codec.model.layers if x.elements_per_token)
    said = f"{len(real)} layers with keys and values, {sum(h * (k + v) for h, k, v in real):,} numbers a token"
    return Line("layers as planned", planned == real, said if planned == real else f"{said}; the plan has {planned}")


def _coded(report: Report) -> Line:
    n_coded = max((layer.n_coded for layer in report.layers), default=0)
    total = report.total
    said = f"{n_coded:,} tokens coded; the whole cache is {total.ratio:.2f} times smaller"
    return Line("bytes fell", n_coded > 0 and total.held < total.dense, said)


def _exact(codec: Codec, report: Report) -> list[Line]:
    """A layer that is left exact without a reason, or one that the model has and the report lacks, fails."""
    left = {layer.layer: layer.reason for layer in report.layers if layer.layer not in codec.layers}
    by_reason: dict[str, list[int]] = {}
    for index, reason in left.items():
        by_reason.setdefault(reason, []).append(index)
    lines = [
        Line("stays exact", bool(reason), f"{len(at)} layers ({_few(at)}): {reason or 'no reason is known'}")
        for reason, at in by_reason.items()
    ]
    lines.append(
        Line("stays exact", bool(codec.layers), f"in {len(codec.layers)} coded layers: {said_window(codec.window)}")
    )
    kept = [layer.exceptions.share for layer in codec.layers.values() if layer.exceptions is not None]
    if kept:
        shares = [share for share in kept if share is not None]
        many = f"{sum(shares) / len(shares):.1%} of the tokens" if shares else "as many as the text has"
        lines.append(Line("stays exact", True, f"tokens of small norm, {many}: they act as sinks wherever they stand"))
    return lines


def _few(at: list[int]) -> str:
    return ", ".join(map(str, at[:6])) + (f" and {len(at) - 6} more" if len(at) > 6 else "")


def first_tokens(tokenizer: Any, text: str, n_tokens: int) -> Int[Tensor, " t"]:
    """The beginning of a text; ValueError if it is shorter."""
    ids: Tensor = tokenizer(text, return_tensors="pt", truncation=False, verbose=False)["input_ids"][0]
    if len(ids) < n_tokens:
        raise ValueError(f"the text has {len(ids):,} tokens; {n_tokens:,} are wanted (--check-tokens)")
    return ids[:n_tokens].to(torch.int64)
