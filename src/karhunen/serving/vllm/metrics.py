"""Series of karhunen on the engine's own Prometheus endpoint: `vllm:karhunen_…`, by model and engine."""

from typing import Any, final

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from karhunen.serving.vllm.stats import RATIOS, SUMS, TIMES, added, summary

PREFIX = "vllm:karhunen_"  # the engine takes series of its own prefix off when it starts anew in one process
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
RATIO_BUCKETS = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
HISTOGRAMS = {name: (words, BUCKETS) for name, words in TIMES.items()} | {
    name: (words, RATIO_BUCKETS) for name, words in RATIOS.items()
}


@final
class KarhunenStats(KVConnectorStats):  # pyright: ignore[reportUntypedBaseClass]
    """What a step's recorders gathered."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Nothing gathered."""
        self.data = {}

    def aggregate(self, other: Any) -> "KarhunenStats":
        """Both together."""
        return KarhunenStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


@final
class KarhunenMetrics(KVConnectorPromMetrics):  # pyright: ignore[reportUntypedBaseClass]
    """A counter for each sum, a histogram for each time and ratio."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._made: dict[str, Any] = {}
        for name, words in SUMS.items():
            self._made[name] = counter(name=f"{PREFIX}{name}", documentation=words, labelnames=labelnames)
        for name, (words, buckets) in HISTOGRAMS.items():
            self._made[name] = histogram(
                name=f"{PREFIX}{name}", documentation=words, buckets=buckets, labelnames=labelnames
            )
        self._labelled = {
            engine: {name: series.labels(*values) for name, series in self._made.items()}
            for engine, values in labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Of one engine."""
        series = self._labelled[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in SUMS:
                series[name].inc(value)
            elif name in HISTOGRAMS:
                for observed in value:
                    series[name].observe(observed)
