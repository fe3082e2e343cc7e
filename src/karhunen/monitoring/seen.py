"""What a dashboard shows: one cache in this process, or the series of any process that exports them.

cache.report(), meter, drift ─▶ Seen ◀─ text of a Prometheus endpoint
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from karhunen.store.report import Report

if TYPE_CHECKING:
    from karhunen.monitoring.meter import Meter

PREFIX = "karhunen_cache"


@runtime_checkable
class Drifting(Protocol):
    """What knows how far a codec drifted, such as `karhunen.adaptation.adapter.Adapter`."""

    def total_drift(self) -> float:
        """1 for none."""
        ...


@final
@dataclass(frozen=True)
class Seen:
    """Now. What nobody measured is None, or empty."""

    dense: float
    held: float
    by_kind: Mapping[str, float]
    n_tokens: float
    n_coded: float
    n_encoded: float | None = None
    encode_seconds: float | None = None
    bits: Mapping[int, float] = field(default_factory=dict)
    moved: Mapping[int, float] = field(default_factory=dict)
    drift: float | None = None

    @property
    def ratio(self) -> float:
        """Uncompressed over held; 1 for an empty cache."""
        return self.dense / self.held if self.held else 1.0


def seen_in(report: Report, meter: "Meter | None" = None, drifting: Drifting | None = None) -> Seen:
    """Of a cache's report, and of whoever watches it."""
    total = report.total
    return Seen(
        dense=total.dense,
        held=total.held,
        by_kind={kind: getattr(total, kind) for kind in ("codes", "side", "exact")},
        n_tokens=max((layer.n_tokens for layer in report.layers), default=0),
        n_coded=max((layer.n_coded for layer in report.layers), default=0),
        n_encoded=None if meter is None else meter.n_encoded,
        encode_seconds=None if meter is None else meter.encode_seconds,
        bits={layer.layer: layer.account.bits_per_element for layer in report.layers if layer.account.n_elements},
        moved={} if meter is None else {layer: found.delta for layer, found in sorted(meter.moved.items())},
        drift=None if drifting is None else drifting.total_drift(),
    )


def seen_from(text: str) -> Seen:
    """Of a Prometheus endpoint's text; ValueError if it holds none of our series, or is no such text."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ValueError("watching a URL needs prometheus-client; pip install 'karhunen[monitoring]'") from error
    found: dict[str, list[Any]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name.removeprefix(f"{PREFIX}_"), []).append(sample)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"this is no text of Prometheus' series: {error}") from error
    if "dense_bytes" not in found or "bytes" not in found:
        raise ValueError(f"there is no series {PREFIX}_bytes; give the address of karhunen's exporter")

    def one(name: str) -> float | None:
        return found[name][0].value if name in found else None

    by_kind = {sample.labels["kind"]: sample.value for sample in found["bytes"]}
    return Seen(
        dense=found["dense_bytes"][0].value,
        held=sum(by_kind.values()),
        by_kind=by_kind,
        n_tokens=one("tokens") or 0,
        n_coded=one("coded_tokens") or 0,
        n_encoded=one("encoded_tokens_total"),
        encode_seconds=one("encode_seconds_total"),
        bits={int(s.labels["layer"]): s.value for s in found.get("layer_bits", ())},
        moved={int(s.labels["layer"]): s.value for s in found.get("attention_accuracy_delta", ())},
        drift=one("model_drift"),
    )
