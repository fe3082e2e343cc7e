"""Caches as Prometheus series, read when they are scraped: a cache that nobody asks does no more than before.

cache ── watch ──▶ CacheCollector ◀── scrape ── Prometheus         held weakly: a cache that is gone is not counted

Bytes are those of `cache.report()`, which are counted from tensors that exist. Needs prometheus-client (extra
`monitoring`).
"""

from collections.abc import Iterable
from typing import Protocol, final, runtime_checkable
from weakref import WeakSet

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from karhunen.store.account import Account
from karhunen.store.report import Report

PREFIX = "karhunen_cache"
KINDS = ("codes", "side", "exact")
HOST = "127.0.0.1"


@runtime_checkable
class Reporting(Protocol):
    """A cache that says what it holds."""

    def report(self) -> Report:
        """All layers."""
        ...


@final
class CacheCollector(Collector):
    """Sums over the caches that are watched. `limit_bytes` is the memory that they may take together, for the share
    that is used (the usage that engines export as `gpu_kv_cache_usage_perc`); None where nobody set one."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"limit_bytes={limit_bytes} holds no cache; give 1 or more, or None")
        self.limit_bytes = limit_bytes
        self._watched: WeakSet[Reporting] = WeakSet()
        self._n_scrapes = 0

    def watch(self, cache: Reporting) -> None:
        """Count this cache from now on, as long as it lives."""
        self._watched.add(cache)

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
        yield CounterMetricFamily(f"{PREFIX}_scrapes", "times these series were read", value=self._n_scrapes)


def serve(collector: CacheCollector, port: int, host: str = HOST) -> int:
    """Answer scrapes on `/metrics` in a thread of the background; the port, which the system chooses if 0 is given."""
    registry = CollectorRegistry()
    registry.register(collector)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_address[1])


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", words, value=value)
