"""Whether coding a cache is worth it for a piece of work, and what to look out for; each with its reason in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import final

from karhunen.byte_sizes import said_bytes
from karhunen.planning.capacity import Capacity, Machine, Work, weights_read
from karhunen.planning.rate import Rate
from karhunen.planning.shape import ModelShape

SHORT_TOKENS, LONG_TOKENS = 4096, 32768
USUAL_RATIO = 8  # of which quality is known best
WORTH = 2  # times smaller, all layers and tokens
FEW_SHARED = 2  # layers of which at most one in so many grows are a hybrid
Pairs = Sequence[tuple[Rate, Capacity]]


@final
@dataclass(frozen=True)
class Remark:
    """In short, and why."""

    said: str
    because: str


def advice(shape: ModelShape, work: Work, weights: float | None, rates: Pairs) -> tuple[Remark, ...]:
    """`rates` begins with the uncompressed cache; of the others the one nearest to USUAL_RATIO is spoken of."""
    if not shape.codable:
        return (Remark("nothing to code", "no layer keeps every token and nothing else"),)
    dense = rates[0][1]
    found: list[Remark] = []
    coded = [pair for pair in rates[1:] if pair[0].coded_bits(shape)]
    if coded:
        usual = min(coded, key=lambda pair: abs(log(_nominal(pair[0], shape) / USUAL_RATIO)))
        found.append(_worth(shape, work, weights, dense, *usual))
        if work.batch == 1 and weights is not None:
            found.append(_alone(shape, work, dense))
    return (*found, *_smaller_already(shape))


def warnings(
    shape: ModelShape, machine: Machine, work: Work, weights: float | None, rates: Sequence[Rate]
) -> tuple[Remark, ...]:
    """What may go wrong."""
    found: list[Remark] = []
    if weights is not None and machine.usable_bytes is not None and weights >= machine.usable_bytes:
        found.append(
            Remark(
                "the weights alone do not fit",
                f"{said_bytes(weights)} of {said_bytes(machine.usable_bytes)}: use more devices or smaller weights",
            )
        )
    if shape.positions is not None and work.context > shape.positions:
        found.append(Remark("longer than the model reads", f"it was made for {shape.positions:,} positions"))
    if machine.n_devices > shape.n_kv_heads > 0:
        why = f"{shape.n_kv_heads} KV heads on {machine.n_devices} devices: tensor parallelism holds copies of them"
        found.append(Remark("the cache is not spread evenly", f"{why}, which these figures do not count"))
    if shape.key_bias:
        why = "a few channels of its keys are far larger than the others, and integers of 4 bits are known to ruin it"
        found.append(Remark("the keys have a bias", f"{why}; check with `karhunen verify`, never by an answer or two"))
    if shape.learned_sinks:
        why = "what all keys have in common does not drop out of the softmax, and 8 bits have been seen to change it"
        found.append(Remark("the softmax has learned sinks", f"{why}; check predictions with `karhunen verify`"))
    if any(rate.calibrated for rate in rates):
        why = "errors grow on text unlike the calibration's"
        found.append(Remark("calibrate on what you serve", f"{why}: `calibrate --text`, then `verify --text`"))
    notes = {note: rate.name for rate in reversed(rates) for note in rate.notes}
    found += [Remark(f"{name} is not counted whole", note) for note, name in reversed(notes.items())]
    unknown = [layer.note for layer, _ in shape.alike if layer.kind == "linear" and not layer.state_bytes()]
    found += [Remark("a part of the cache is not counted", note) for note in unknown]
    if machine.bandwidth is not None:
        why = "they count bytes alone, and how fast karhunen decodes on a GPU has not been measured"
        found.append(Remark("seconds are floors", f"{why}: `karhunen bench` measures, `plan --check` compares"))
    return tuple(found)


def _worth(
    shape: ModelShape, work: Work, weights: float | None, dense: Capacity, rate: Rate, coded: Capacity
) -> Remark:
    ratio, nominal = coded.ratio, _nominal(rate, shape)
    share = "" if weights is None else f"the cache is {dense.held_bytes / (dense.held_bytes + weights):.0%} of memory; "
    if work.context < SHORT_TOKENS:
        why = f"{share}{rate.name} makes it {ratio:.1f} times smaller here"
        if f"{ratio:.1f}" != f"{nominal:.1f}":
            why += f", not {nominal:.1f}: what the window keeps exact weighs most"
        return Remark("little to gain below 4,096 tokens", why)
    faster = ""
    if dense.step_seconds and coded.step_seconds:
        faster = f", and its decode step's floor {dense.step_seconds / coded.step_seconds:.1f} times shorter"
    why = f"{share}{rate.name} makes it {ratio:.1f} times smaller{faster}"
    if work.context >= LONG_TOKENS:
        return Remark("worth it" if ratio >= WORTH else "little to gain", why)
    return Remark("worth it if memory is what you run out of", f"{why}; from {LONG_TOKENS:,} tokens on it is more")


def _nominal(rate: Rate, shape: ModelShape) -> float:
    return rate.nominal_ratio(shape) or 1.0


def _alone(shape: ModelShape, work: Work, dense: Capacity) -> Remark:
    read = weights_read(shape, work, 1)
    why = f"one sequence reads {said_bytes(read)} of weights for {said_bytes(dense.held_bytes)} of cache at each step"
    if read > dense.held_bytes:
        return Remark("batches gain more", f"{why}; many sequences share the weights, each has a cache of its own")
    return Remark("one sequence gains too", why)


def _smaller_already(shape: ModelShape) -> list[Remark]:
    found: list[Remark] = []
    layer = shape.codable[0]
    grouped = layer.n_query_heads // layer.n_kv_heads if layer.n_kv_heads else 1
    if layer.kind == "latent":
        why = (
            f"a token caches one latent of {layer.elements_per_token} numbers a layer, for {layer.n_query_heads} heads"
        )
        found.append(Remark("less to gain: the cache is a latent already", why))
    elif grouped > 1:
        why = f"{grouped} query heads share a KV head, so the cache is {grouped} times smaller than without"
        found.append(Remark("less to gain: grouped queries", why))
    if FEW_SHARED * len(shape.codable) <= len(shape.layers):
        why = f"{len(shape.codable)} of {len(shape.layers)} layers keep every token; the others do not grow"
        found.append(Remark("less to gain: a hybrid", why))
    return found
