"""Counters, times and ratios of one process between two steps, as plain values that are sent, added and exported.

Sums add, lists are joined; a Prometheus series is made of each (metrics.py).
"""

from threading import Lock
from typing import Any, final

SUMS = {
    "pages_found": "pages of prompts that a lookup found in the store",
    "pages_missed": "pages of prompts that a lookup did not find",
    "pages_loaded": "pages decoded into the engine's cache",
    "pages_saved": "pages coded and put into the store",
    "bytes_loaded": "bytes read from the store",
    "bytes_saved": "bytes that coding saved of what was put into the store",
    "bytes_stored": "bytes put into the store",
    "refusals": "pages found and refused: damaged, or another model's or codec's",
    "store_failures": "calls that the store did not do",
    "load_failures": "requests whose pages could not all be loaded; the engine read the rest",
    "pages_dropped": "pages not stored because too much waited to be coded",
    "lookup_timeouts": "lookups that took too long and counted as nothing found",
}
TIMES = {
    "encode_seconds": "seconds to code and store the pages of one step of one request, beside the engine's steps",
    "decode_seconds": "seconds to read and decode the pages of one request, beside the engine's steps",
    "snapshot_seconds": "seconds to copy the blocks of a step, on the engine's step",
    "lookup_seconds": "seconds to ask the store which pages of a prompt it has",
    "accuracy_seconds": "seconds to decode and compare a sampled page, beside the engine's steps",
}
RATIOS = {
    "attention_accuracy_delta": "of a sampled page, how far attention's outputs move when it is decoded, relative to "
    "them (karhunen.monitoring.attention_accuracy; keys stand in for queries)",
}


@final
class Recorder:
    """Gathers until it is emptied; threads share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._data: dict[str, Any] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """To a sum."""
        assert name in SUMS, f"{name} is no sum; see SUMS"
        with self._lock:
            self._data[name] = self._data.get(name, 0) + amount

    def time(self, name: str, seconds: float) -> None:
        """One observation."""
        assert name in TIMES, f"{name} is no time; see TIMES"
        self._append(name, seconds)

    def ratio(self, name: str, value: float) -> None:
        """One observation."""
        assert name in RATIOS, f"{name} is no ratio; see RATIOS"
        self._append(name, value)

    def take(self) -> dict[str, Any]:
        """What was gathered since the last call."""
        with self._lock:
            data, self._data = self._data, {}
        return data

    def _append(self, name: str, value: float) -> None:
        with self._lock:
            self._data.setdefault(name, []).append(value)


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both together: `+` adds numbers and joins lists."""
    return {name: one[name] + other[name] if name in one and name in other else one.get(name, other.get(name))
            for name in {**one, **other}}  # fmt: skip


def summary(data: dict[str, Any]) -> dict[str, int | float]:
    """For a line of the engine's log."""
    means = {
        f"mean_{name}": round(sum(data[name]) / len(data[name]), 4) for name in (*TIMES, *RATIOS) if data.get(name)
    }
    return {name: data[name] for name in SUMS if data.get(name)} | means
