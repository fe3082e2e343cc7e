"""The command that serves, and a store's inventory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.stand_in import FULL, codec_of
from tests.synthetic import cached

from karhunen.pages import PageCodec
from karhunen.serving.inventory import inventory, remove
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm import serve
from karhunen.stores import MemoryStore


@pytest.fixture
def settings(tmp_path: Path) -> ServingSettings:
    codec_of(FULL).save_pretrained(tmp_path / "codec")
    return ServingSettings(str(tmp_path / "codec"), str(tmp_path / "store"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("installed")
def test_the_servers_command(settings: ServingSettings) -> None:
    command = serve.server_command("org/model", settings, ["--port", "8123"], "prefill")
    given = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert given == {
        "kv_connector": "KarhunenConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": given["kv_connector_extra_config"],
    }  # fmt: skip
    assert ServingSettings.from_dict(given["kv_connector_extra_config"]) == settings
    assert command[command.index("--model") + 1] == "org/model" and command[-2:] == ["--port", "8123"]
    assert serve.address(command) == "http://127.0.0.1:8123"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("words", [["--host", "0.0.0.0"], ["--host=0.0.0.0"]])
def test_it_listens_elsewhere_only_if_told(settings: ServingSettings, words: list[str]) -> None:
    assert serve.address(serve.server_command("org/model", settings, words)) == "http://0.0.0.0:8000"
    assert "127.0.0.1" in serve.server_command("org/model", settings)


@pytest.mark.usefixtures("installed")
def test_what_cannot_work_is_refused_before_the_engine_starts(settings: ServingSettings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        serve.server_command("org/model", settings, ["--kv-transfer-config={}"])
    with pytest.raises(ValueError, match="unknown role"):
        serve.server_command("org/model", settings, role="all")
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        serve.server_command("org/model", ServingSettings(str(tmp_path), settings.store))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="not a folder"):
        serve.server_command("org/model", ServingSettings(settings.codec, str(tmp_path / "file")))


def test_a_missing_engine_is_said(settings: ServingSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"karhunen\[vllm\]"):
        serve.server_command("org/model", settings)


def store_of_two_models() -> MemoryStore:
    store = MemoryStore()
    for weights, n in (("aa" * 16, 3), ("bb" * 16, 1)):
        pages = PageCodec(codec_of(FULL), torch.float32, weights)
        key, value = (x[0] for x in cached(FULL, 1, 16 * n))
        for i, page in enumerate(pages.encode_pages({0: (key, value)}, torch.arange(16 * n), 16)):
            store.put(f"{weights[:2]}{i}", page)
    store.put("torn", b"KARHPAGE and then nothing")
    return store


def test_a_store_is_listed_by_model_and_codec() -> None:
    found = inventory(store_of_two_models())
    assert [(held.weights[:2], held.pages, held.tokens) for held in found.holdings] == [("aa", 3, 48), ("bb", 1, 16)]
    assert found.damaged == 1
    assert found.n_bytes == store_of_two_models().n_bytes


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"fingerprint": "aaaaaaaa"}, ["bb0", "torn"]),
        ({"damaged": True}, ["aa0", "aa1", "aa2", "bb0"]),
        ({"all_of_it": True}, []),
    ],
    ids=str,
)
def test_pages_are_removed_by_what_they_are(asked: dict[str, Any], left: list[str]) -> None:
    store = store_of_two_models()
    assert remove(store, **asked)[0] == 5 - len(left)
    assert sorted(store.keys()) == left


@pytest.mark.parametrize("asked", [{}, {"fingerprint": "aa"}], ids=str)
def test_a_removal_that_says_not_what_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"which pages|too short"):
        remove(store_of_two_models(), **asked)
