"""Codecs shared through the hub's mixin, offline: what is pushed lands in a stand-in of the hub's cache layout."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from tests.synthetic import codec

from karhunen.card import Gate, ReportCard
from karhunen.codec import Codec
from karhunen.folder import CONFIG
from karhunen.hf.hub import HubCodec


def verified(name: str) -> Codec:
    made = codec(name)
    gates = (Gate("KL, mean", 0.0013, 0.02, at_least=False, unit="nats"), Gate("needles", 0, 0.9, True, reason="hard"))
    card = ReportCard(made.fingerprint(), "smollm2", "float32", ("prose 1",), 1152, 2.0, 8.0, gates, {"torch": "2"})
    return replace(made, card=card)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder as the hub's downloads leave it; uploads go straight there."""
    cache = tmp_path / "hub"

    def create_repo(self: HfApi, repo_id: str, **settings: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self: HfApi, *, repo_id: str, folder_path: Path, **settings: Any) -> str:
        commit = hashlib.sha1(repo_id.encode()).hexdigest()
        home = cache / f"models--{repo_id.replace('/', '--')}"
        shutil.copytree(folder_path, home / "snapshots" / commit)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(commit)
        return commit

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return cache


def fetched(hub: Path, name: str) -> Codec:
    return HubCodec.from_pretrained(name, cache_dir=hub, local_files_only=True).codec


def test_what_is_pushed_is_what_is_fetched_with_its_report_card(hub: Path) -> None:
    made = verified("karhunen")
    HubCodec(made).push_to_hub("org/codec")
    got = fetched(hub, "org/codec")
    assert got.fingerprint() == made.fingerprint()
    assert got.card == made.card
    assert got.model == made.model


def test_the_model_card_is_written_from_the_report_card(hub: Path) -> None:
    made = verified("int4")
    HubCodec(made).push_to_hub("org/codec")
    (readme,) = hub.glob("models--org--codec/snapshots/*/README.md")
    text = readme.read_text()
    assert text.startswith("---\nlibrary_name: karhunen\n")
    row = "| KL, mean | 0.0013 nats | ≤ 0.02 nats |  | passed |"
    for words in (row, "8.0 times smaller", "**passed**", "inconclusive: hard", made.fingerprint(), "HubCodec"):
        assert words in text
    assert "Nothing yet" in HubCodec(codec("int4")).generate_model_card().content


def test_a_folder_is_read_like_a_repository(tmp_path: Path) -> None:
    HubCodec(verified("int8")).save_pretrained(tmp_path / "codec")
    assert (tmp_path / "codec" / "README.md").is_file()
    assert HubCodec.from_pretrained(tmp_path / "codec").codec.fingerprint() == codec("int8").fingerprint()
    with pytest.raises(ValueError, match="takes no frobnicate"):
        HubCodec.from_pretrained(tmp_path / "codec", frobnicate=1)


def test_a_damaged_repository_is_refused(hub: Path) -> None:
    HubCodec(verified("int4")).push_to_hub("org/codec")
    (config,) = hub.glob(f"models--org--codec/snapshots/*/{CONFIG}")
    config.write_text(config.read_text().replace('"passed"', '"Passed"').replace("0.0013", "0.0001"))
    with pytest.raises(ValueError, match="altered"):
        fetched(hub, "org/codec")
