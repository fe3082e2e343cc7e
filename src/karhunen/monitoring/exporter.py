"""Caches as Prometheus series, read when they are scraped: a cache that nobody asks does no more than before.

cache ── watch ──▶ CacheCollector ◀── scrape ── Prometheus         held weakly: a cache that is gone is not counted

Bytes are those of `cache.report()`, which are counted from tensors that exist. What happens between two scrapes (tokens
coded, seconds, `attention_accuracy_delta`) takes a `Meter`, drift an adapter; without them these series are not there.
Needs prometheus-client (extra `monitoring`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import add
from typing import Any, Protocol, final, runtime_checkable
from weakref import WeakSet

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from karhunen.monitoring.meter import Meter, Metered
from karhunen.monitoring.seen import PREFIX
from karhunen.statistics.need import Slot
from karhunen.store.account import Account
from karhunen.store.report import Report

KINDS = ("codes", "side", "exact")
HOST = "127.0.0.1"


@runtime_checkable
class Reporting(Protocol):
    """A cache that says what it holds."""

    def report(self) -> Report:
        """All layers."""
        ...


@runtime_checkable
class HasRatio(Protocol):
    """Drift of one side, by head group."""

    @property
    def ratio(self) -> Any:
        """1 or more."""
        ...


@runtime_checkable
class KnowsDrift(Protocol):
    """Such as `karhunen.adaptation.adapter.Adapter`."""

    def drift(self) -> Mapping[tuple[int, Slot], HasRatio]:
        """By layer and side."""
        ...

    def total_drift(self) -> float:
        """Of the model."""
        ...


@final
class CacheCollector(Collector):
    """Sums over the caches that are watched. `limit_bytes` is the memory that they may take together, for the share
    that is used (the usage that engines export as `gpu_kv_cache_usage_perc`); None where nobody set one. A `meter` is
    given every cache that is watched; `adapter` says drift; `n_preempted` asks an engine how many requests it has
    preempted so far. Each is None where there is none, and its series are missing."""

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        meter: Meter | None = None,
        adapter: KnowsDrift | None = None,
        n_preempted: Callable[[], int] | None = None,
    ) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"limit_bytes={limit_bytes} holds no cache; give 1 or more, or None")
        self.limit_bytes = limit_bytes
        self.meter, self.adapter, self.n_preempted = meter, adapter, n_preempted
        self._watched: WeakSet[Reporting] = WeakSet()
        self._n_scrapes = 0

    def watch(self, cache: Reporting) -> None:
        """Count this cache from now on, as long as it lives."""
        self._watched.add(cache)
        if self.meter is not None and isinstance(cache, Metered):
            self.meter.watch(cache)

    def collect(self) -> Iterable[Metric]:
        """The series now: bytes by kind, uncompressed bytes, ratio, tokens, shared tables, share of the limit."""
        self._n_scrapes += 1
        reports = [cache.report() for cache in list(self._watched)]
        total = sum((report.total for report in reports), Account())
        held = GaugeMetricFamily(f"{PREFIX}_bytes", "bytes held, by kind", labels=["kind"])
        for kind in KINDS:
            held.add_metric([kind], getattr(total, kind))
        yield held
        yield _gauge("dense_bytes", "bytes that the uncompressed caches would hold", total.dense)
        yield _gauge("ratio", "uncompressed bytes over bytes held", total.ratio)
        yield _gauge("coded_ratio", "the same of the coded tokens alone", total.coded_ratio)
        yield _gauge("caches", "caches that are watched", len(reports))
        for name, words in (("n_tokens", "tokens held"), ("n_coded", "tokens coded")):
            n = sum(max((getattr(layer, name) for layer in report.layers), default=0) for report in reports)
            yield _gauge(name.removeprefix("n_").replace("coded", "coded_tokens"), words, n)
        tables = {report.recipe: report.table_bytes for report in reports}
        yield _gauge("table_bytes", "bytes of shared tables, once a recipe", sum(tables.values()))
        if self.limit_bytes is not None:
            yield _gauge("usage_ratio", "share of the limit that is held", total.held / self.limit_bytes)
        yield from _bits(reports)
        if self.meter is not None:
            yield from _metered(self.meter)
        if self.adapter is not None:
            yield from _drift(self.adapter)
        if self.n_preempted is not None:
            yield CounterMetricFamily("num_preempted_reqs", "requests the engine preempted", value=self.n_preempted())
        yield CounterMetricFamily(f"{PREFIX}_scrapes", "times these series were read", value=self._n_scrapes)


def _bits(reports: list[Report]) -> Iterator[Metric]:
    """Of each layer, over the caches."""
    held: dict[int, list[Account]] = {}
    for layer in (layer for report in reports for layer in report.layers):
        held.setdefault(layer.layer, []).append(layer.account)
    found = GaugeMetricFamily(f"{PREFIX}_layer_bits", "bits held per cached number, exact tokens too", labels=["layer"])
    for layer, accounts in sorted(held.items()):
        total = reduce(add, accounts)
        if total.n_elements:
            found.add_metric([str(layer)], total.bits_per_element)
    yield found


def _metered(meter: Meter) -> Iterator[Metric]:
    """Counters, and the last comparison of each sampled layer."""
    words = {"encoded_tokens": "tokens coded so far", "encode_seconds": "seconds that coding took, all layers"}
    values = {"encoded_tokens": meter.n_encoded, "encode_seconds": meter.encode_seconds}
    for name, value in values.items():
        yield CounterMetricFamily(f"{PREFIX}_{name}", words[name], value=value)
    moved = GaugeMetricFamily(
        f"{PREFIX}_attention_accuracy_delta",
        "how far attention's outputs moved when tokens were coded",
        labels=["layer", "asked"],
    )
    for layer, found in sorted(meter.moved.items()):
        moved.add_metric([str(layer), found.asked], found.delta)
    yield moved


def _drift(adapter: KnowsDrift) -> Iterator[Metric]:
    """The worst head group of each side, and the whole model."""
    found = GaugeMetricFamily(f"{PREFIX}_drift", "expected cost over that of a codec fitted today, worst head group",
                              labels=["layer", "side"])  # fmt: skip
    for (layer, side), drift in sorted(adapter.drift().items()):
        found.add_metric([str(layer), side], max(map(float, drift.ratio)))
    yield found
    yield _gauge("model_drift", "the same of the whole model", adapter.total_drift())


def serve(collector: CacheCollector, port: int, host: str = HOST) -> int:
    """Answer scrapes on `/metrics` in a thread of the background; the port, which the system chooses if 0 is given."""
    registry = CollectorRegistry()
    registry.register(collector)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_address[1])


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", words, value=value)
