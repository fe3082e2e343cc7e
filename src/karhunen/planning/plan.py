"""A plan: a model, a machine and a piece of work, with what each rate makes of them.

shape + machine + work + rates ──▶ capacities ──▶ what stays exact, advice, warnings ──▶ tables, JSON, picture
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, final

from karhunen.planning.advice import Remark, advice, warnings
from karhunen.planning.capacity import Capacity, Machine, Work, capacity, weight_bytes, weights_read
from karhunen.planning.rate import DENSE, Rate
from karhunen.planning.shape import CacheLayer, ModelShape


@final
@dataclass(frozen=True)
class Row:
    """One rate and what it makes possible."""

    rate: Rate
    capacity: Capacity


@final
@dataclass(frozen=True)
class Plan:
    """All of it; the first row is the uncompressed cache. `weight_bytes` is None where it is not known."""

    shape: ModelShape
    machine: Machine
    work: Work
    rows: tuple[Row, ...]
    weight_bytes: float | None
    advice: tuple[Remark, ...]
    warnings: tuple[Remark, ...]

    @property
    def dense(self) -> Capacity:
        """Of the uncompressed cache."""
        return self.rows[0].capacity

    @property
    def exact(self) -> tuple[tuple[str, str], ...]:
        """What stays exact, and why."""
        found = [(f"{n} {layer.kind} layers", _why_exact(layer)) for layer, n in self.shape.alike if not layer.codable]
        windows = {row.rate.window: row.rate.name for row in reversed(self.rows[1:]) if row.rate.window}
        found += [
            (window, f"{name}: sinks are read whatever they say, the newest most")
            for window, name in reversed(windows.items())
        ]
        return tuple(found)

    def end_to_end(self, row: Row) -> dict[str, float | None]:
        """How many times the uncompressed cache's each is: context, batch, steps a second, tokens a second at best."""
        mine, dense = row.capacity, self.dense
        return {
            "context": _times(mine.max_context, dense.max_context),
            "batch": _times(mine.max_batch, dense.max_batch),
            "step_speed": _times(dense.step_seconds, mine.step_seconds),
            "throughput": _times(mine.best_tokens_per_second, dense.best_tokens_per_second),
        }

    def document(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`."""
        shape, work = self.shape, self.work
        per_device = {k: v for k, v in asdict(self.machine).items() if k != "n_devices"}
        layers = [
            {
                **asdict(layer),
                "n_layers": n,
                "bytes_per_token": ceil(layer.elements_per_token * n * work.cache_bits / 8),
                "bytes": ceil(work.batch * n * layer.dense_bytes(work.context, work.cache_bits)),
            }
            for layer, n in shape.alike
        ]
        rates = [
            {
                "rate": row.rate.name,
                "bits_per_coded_element": row.rate.coded_bits(shape),
                "nominal_ratio": row.rate.nominal_ratio(shape),
                "window": row.rate.window,
                "table_bytes": row.rate.table_bytes(shape),
                "tables": [{**asdict(t), "layers_alike": dict(shape.alike)[k]} for k, t in row.rate.tables.items()],
                "notes": list(row.rate.notes),
                **asdict(row.capacity),
                "held_bytes": ceil(row.capacity.held_bytes),
                "times_dense": self.end_to_end(row),
            }
            for row in self.rows
        ]
        known = self.weight_bytes is not None
        return {
            "model": shape.name,
            "architecture": shape.architecture,
            "source": shape.source,
            "positions": shape.positions,
            "machine": {"n_devices": self.machine.n_devices, **per_device},
            "work": asdict(work),
            "weight_bytes": None if self.weight_bytes is None else ceil(self.weight_bytes),
            "weight_bytes_read": ceil(weights_read(shape, work, work.batch)) if known else None,
            "layers": layers,
            "dense_bytes_per_token": sum(layer["bytes_per_token"] for layer in layers if layer["kind"] != "sliding"),
            "dense_bytes": ceil(self.dense.held_bytes),
            "rates": rates,
            "stays_exact": [{"what": what, "why": why} for what, why in self.exact],
            "advice": [asdict(remark) for remark in self.advice],
            "warnings": [asdict(remark) for remark in self.warnings],
        }


def make_plan(shape: ModelShape, machine: Machine, work: Work, rates: Sequence[Rate]) -> Plan:
    """The plan of these rates beside the uncompressed cache; ValueError where a number that is needed is not known."""
    needed = machine.memory_bytes is not None or machine.bandwidth is not None or work.weights is not None
    weights = weight_bytes(shape, work) if needed or shape.weights is not None else None
    rows = tuple(Row(rate, capacity(shape, rate, machine, work)) for rate in (DENSE, *rates))
    pairs = [(row.rate, row.capacity) for row in rows]
    return Plan(
        shape=shape,
        machine=machine,
        work=work,
        rows=rows,
        weight_bytes=weights,
        advice=advice(shape, work, weights, pairs),
        warnings=warnings(shape, machine, work, weights, list(rates)),
    )


def _why_exact(layer: CacheLayer) -> str:
    if layer.kind == "sliding":
        return f"a window of {layer.window_tokens:,} tokens does not grow with the text"
    if layer.kind == "linear":
        return f"{layer.note or 'a state'}: it does not grow with the text"
    return layer.note


def _times(mine: float | None, theirs: float | None) -> float | None:
    return mine / theirs if mine is not None and theirs else None
