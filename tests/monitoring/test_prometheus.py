"""Every series against the value it stands for; the dashboard asks for series that are exported; a real server."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.cli.metered import N_CODED, watched

import karhunen.monitoring
from karhunen.adaptation.drift import Drift
from karhunen.hf.cache import CompressedCache
from karhunen.monitoring.exporter import CacheCollector, serve
from karhunen.monitoring.meter import Meter

DASHBOARD = Path(karhunen.monitoring.__file__).parent / "dashboards" / "grafana.json"
PROMETHEUS = shutil.which("prometheus")
SECONDS = 60


class Drifted:
    """As an adapter says it."""

    def drift(self) -> dict[tuple[int, str], Drift]:
        return {(1, "key"): Drift(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0]))}

    def total_drift(self) -> float:
        return 4 / 3


Exported = tuple[int, CompressedCache, Meter]


@pytest.fixture(scope="module")
def exported() -> Iterator[Exported]:
    """With everything that can be exported."""
    meter = Meter()
    collector = CacheCollector(10**6, meter=meter, adapter=Drifted(), n_preempted=lambda: 7)
    cache = watched(collector)
    yield serve(collector, 0), cache, meter
    cache.close()


def series(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        " ".join([sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))]): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_series_is_what_it_stands_for(exported: Exported) -> None:
    port, cache, meter = exported
    said, report = series(port), cache.report()
    assert said["karhunen_cache_encoded_tokens_total"] == N_CODED
    assert said["karhunen_cache_encode_seconds_total"] == pytest.approx(meter.encode_seconds)
    assert said["karhunen_cache_drift layer=1 side=key"] == 1.5
    assert said["karhunen_cache_model_drift"] == pytest.approx(4 / 3)
    assert said["num_preempted_reqs_total"] == 7
    for layer in report.layers:
        bits = 8 * layer.account.held / layer.account.n_elements
        assert said[f"karhunen_cache_layer_bits layer={layer.layer}"] == pytest.approx(bits)
    for index, moved in meter.moved.items():
        name = f"karhunen_cache_attention_accuracy_delta asked=keys layer={index}"
        assert said[name] == pytest.approx(moved.delta)
    assert meter.moved


def test_what_nobody_asked_for_is_not_exported() -> None:
    names = {family.name for family in CacheCollector().collect()}
    assert not names & {"num_preempted_reqs", "karhunen_cache_drift", "karhunen_cache_encoded_tokens"}


def queries() -> list[str]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_series_that_are_exported_and_for_all_of_them(exported: Exported) -> None:
    names = {name.split(" ")[0] for name in series(exported[0])}
    ours = {name for name in names if name.startswith(("karhunen_", "num_"))}
    asked = {name for query in queries() for name in re.findall(r"\b(?:karhunen_cache|num)_\w+", query)}
    assert asked == ours
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus here (Debian's package of that name)")
def test_a_real_server_scrapes_them_and_answers_every_query_of_the_dashboard(
    exported: Exported, tmp_path: Path
) -> None:
    port, cache, _ = exported
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: karhunen, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    server = subprocess.Popen(
        [str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
         f"--web.listen-address=127.0.0.1:{own}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def ask(query: str) -> list[dict[str, Any]]:
        address = f"http://127.0.0.1:{own}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            said = json.load(answer)
        assert said["status"] == "success", query
        return said["data"]["result"]

    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                scraped = ask("count_over_time(karhunen_cache_ratio[1m])")
                if scraped and float(scraped[0]["value"][1]) >= 3:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        (found,) = ask("karhunen_cache_ratio")
        assert float(found["value"][1]) == pytest.approx(cache.report().total.ratio)
        for query in queries():
            plain = query.replace('{instance=~"$instance"}', "")
            assert ask(plain), plain
    finally:
        server.terminate()
        server.wait(timeout=30)
