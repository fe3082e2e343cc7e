"""Bytes that calibration will hold, worked out from sizes before anything runs.

    peak of a device = weights + max(forward and measuring, gradients)      + statistics, where it is the host
    forward          = cache of all layers + the largest of one layer's: attention, feed-forward part, measuring
    gradients        = input of every layer + the largest of: one layer's backward pass, logits of HEAD_TOKENS tokens

The factors below are counts of vectors that stand at the same time, read off the code that makes them and held against
an allocator's record by tests; a float32 model takes about what they say, others a little less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from karhunen import device
from karhunen.calibration.measure import CHUNK_ELEMENTS
from karhunen.calibration.reading import PAIRS_PER_ROW, ROWS_PER_SEQUENCE
from karhunen.hf.gradients import HEAD_TOKENS, ROWS
from karhunen.hf.sizes import LayerSizes, ModelSizes
from karhunen.statistics.need import SLOTS, Need

F32, F64 = 4, 8
MAX_SAMPLES = 16384  # vectors kept of a layer's head, over the whole text
HOST = str(device.HOST)
CACHE, INPUTS = "cache", "inputs of layers"
PER_LAYER = (CACHE, INPUTS)  # what every layer on a device adds to; all else is of one layer at a time


@final
@dataclass(frozen=True)
class Work:
    """What a calibration does: which statistics of which layers, on how much text, how many sequences at a time."""

    needs: tuple[Need, ...]
    layers: tuple[int, ...]
    n_tokens: int
    sequence_tokens: int
    batch: int = 1


@final
@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device by what they are for. Phases follow one another; all else stands throughout."""

    device: str
    weights: int
    statistics: int
    forward: Mapping[str, int]
    gradients: Mapping[str, int]

    @property
    def working(self) -> int:
        """Beside the weights, at the peak."""
        return self.statistics + max(sum(self.forward.values()), sum(self.gradients.values()))

    @property
    def peak(self) -> int:
        """All that is held at the same time."""
        return self.weights + self.working


def memory_of(sizes: ModelSizes, work: Work) -> tuple[DeviceMemory, ...]:
    """Bytes of one process on each device; the host is the last one if no part of the model is there."""
    devices = [*sizes.devices, *([] if HOST in sizes.devices else [HOST])]
    return tuple(
        DeviceMemory(
            device=device,
            weights=sizes.weight_bytes(device),
            statistics=statistics_bytes(sizes, work) if device == HOST else 0,
            forward=_forward(sizes, work, device),
            gradients=_gradients(sizes, work, device) if any(n.kind == "gradients" for n in work.needs) else {},
        )
        for device in devices
    )


def statistics_bytes(sizes: ModelSizes, work: Work) -> int:
    """Sums and samples of all measured layers, as they are kept to the end."""
    return sum(_kept(need, sizes.layers[i], sizes.hidden, work.n_tokens) for i in work.layers for need in work.needs)


def _kept(need: Need, layer: LayerSizes, hidden: int, n_tokens: int) -> int:
    width, groups = _vectors(need, layer)
    if need.kind == "samples":
        return min(MAX_SAMPLES, -(-n_tokens // need.stride)) * (width * F32 + F64)
    if need.kind == "projection":
        return (hidden + 1) * width * F32
    if need.kind == "activations":
        groups, width = 1, hidden
    return groups * (width // groups + 1) ** 2 * F64


def _vectors(need: Need, layer: LayerSizes) -> tuple[int, int]:
    """Numbers of a token that a need is about, and the groups that they are in."""
    widths, n_heads = layer.cached
    return widths[SLOTS.index(need.slot)], 1 if need.joined else n_heads


def _forward(sizes: ModelSizes, work: Work, device: str) -> dict[str, int]:
    layers = [(i, layer) for i, layer in enumerate(sizes.layers) if layer.device == device]
    if not layers:
        return {}
    numbers = work.batch * work.sequence_tokens * sizes.dtype_bytes
    cache = numbers * sum(sum(layer.cached[0]) for _, layer in layers)
    attention = max(_attention_forward(sizes, work, layer) for _, layer in layers)
    mlp = max(int(numbers * (3 * layer.mlp + 5.5 * sizes.hidden)) for _, layer in layers)
    measured = [layer for i, layer in layers if i in work.layers]
    measuring = max((_measuring(sizes, work, layer) for layer in measured), default=0)
    return {
        CACHE: cache,
        "activations of a layer": max(attention, mlp),
        "measuring": max(0, measuring - max(attention, mlp)),
    }


def _attention_forward(sizes: ModelSizes, work: Work, layer: LayerSizes) -> int:
    tokens = work.batch * work.sequence_tokens
    scores = tokens * work.sequence_tokens * layer.n_query_heads * (sizes.dtype_bytes + F32)
    vectors = 3 * sizes.hidden + 3 * layer.query + layer.key + layer.value
    return tokens * vectors * sizes.dtype_bytes + (scores if sizes.writes_scores else 0)


def _measuring(sizes: ModelSizes, work: Work, layer: LayerSizes) -> int:
    """What stands while the costliest need of a layer is measured."""
    live = 2 * sizes.hidden + layer.query + layer.key + layer.value
    steps = [_step(need, layer, sizes.hidden, work.sequence_tokens) for need in work.needs if need.kind != "gradients"]
    return work.batch * work.sequence_tokens * live * sizes.dtype_bytes + max(steps, default=0)


def _step(need: Need, layer: LayerSizes, hidden: int, tokens: int) -> int:
    width, groups = _vectors(need, layer)
    rows = layer.n_query_heads * min(ROWS_PER_SEQUENCE, tokens) * tokens * F32
    if need.kind == "queries":
        blocks = 1 if need.block_tokens is None else min(PAIRS_PER_ROW, -(-tokens // need.block_tokens))
        pairs = layer.query * min(ROWS_PER_SEQUENCE, tokens) * blocks
        return 2 * rows + 4 * min(pairs, CHUNK_ELEMENTS) * F32
    if need.kind == "outputs":
        return int(2.5 * rows)
    if need.kind == "activations":
        return (5 * tokens + 2 * hidden) * hidden * F32
    if need.kind == "projection":
        return (4 * tokens + 3 * hidden) * width * F32
    if need.kind == "output_gram":
        return 3 * layer.query * hidden * F64
    vectors = (3 if need.block_tokens is None else 4.5) * tokens * width * F64
    outer = 2 * width * width // groups * F64
    return int(vectors) + outer + (3 * rows if need.kind == "attended" else 0)


def _gradients(sizes: ModelSizes, work: Work, device: str) -> dict[str, int]:
    """Of one sequence at a time, whatever the batch of the forward is."""
    layers = [layer for layer in sizes.layers if layer.device == device]
    tokens, s = work.sequence_tokens, sizes.dtype_bytes
    kept = len(layers) * tokens * sizes.hidden * s
    layer = max((_layer_backward(sizes, work, layer) for layer in layers), default=0)
    logits = 0
    if device == sizes.head_device:
        logits = 4 * HEAD_TOKENS * sizes.vocabulary * F32 + 3 * tokens * sizes.hidden * s
        logits += HEAD_TOKENS * sizes.vocabulary * s if s < F32 else 0
    return {INPUTS: kept, "backward of a layer": layer, "logits": max(0, logits - layer)}


def _layer_backward(sizes: ModelSizes, work: Work, layer: LayerSizes) -> int:
    tokens, s, hidden = work.sequence_tokens, sizes.dtype_bytes, sizes.hidden
    both = layer.key + layer.value
    norms = 2 * tokens * hidden * (F32 - s)  # norms work in float32 whatever the model's dtype is
    mlp = tokens * s * (6 * layer.mlp + 5 * hidden + 2 * layer.query + 2 * both) + norms
    saved = tokens * s * (4 * hidden + 2 * layer.query + both) + norms
    summed = tokens * F32 * (2.5 * layer.query + 2 * both)
    group = layer.n_query_heads // layer.n_kv_heads
    tables = ROWS * tokens * (6 * group + 3) * F32
    moments = 5 * tokens * max(layer.cached[0]) * F64
    scores = 2 * layer.n_query_heads * tokens * tokens * F32 if sizes.writes_scores else 0
    reading = saved + summed + max(tables, moments) + scores
    # to go back through its expansion a latent layer runs once more, whole, while attention's backward pass stands
    return int(max(mlp, reading) if layer.latent is None else mlp + reading)
