"""Two sets of documents that share nothing, with each other or with the calibration text; literature known by hash."""

import hashlib
import importlib.util
import io
import re
import tarfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from karhunen.calibration import texts
from karhunen.calibration.texts import calibration_text
from karhunen.evaluation import documents, literature
from karhunen.evaluation.documents import MODULES, SPLITS, Split, default_documents, prose
from karhunen.evaluation.literature import work
from karhunen.hf import packages
from karhunen.hf.packages import PackageUnavailable

SIZES = {"prefill_tokens": 300, "scored_tokens": 40}
OF_THE_PAST = {
    name: f"{name.upper()}\r\n\r\n" + "".join(f"In {name} {i} was written before our time.\r\n" for i in range(400))
    for name in ("asyoulik", "alice29", "plrabn12")
}


class Words:
    """A tokenizer whose tokens are words, so that what a document holds can be read."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.known: dict[str, int] = {}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        for word in text.split():
            if word not in self.known:
                self.known[word] = len(self.words)
                self.words.append(word)
        return {"input_ids": [self.known[word] for word in text.split()]}

    def said(self, document: documents.Document) -> str:
        return " ".join(self.words[i] for i in document.tokens.tolist())


class Index:
    """A package index of one source archive, and the count of what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.archive = archive_of({name: text.encode() for name, text in OF_THE_PAST.items()})

    def run_pip(
        self, requirement: str, into: Path, work: Path, on_bytes: Callable[[int, int], None], sdist_sha256: str | None
    ) -> None:
        self.asked.append(requirement)
        (into / "brotli-1.2.1.tar.gz").write_bytes(self.archive)


def archive_of(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{literature.FOLDER_IN_ARCHIVE}/{name}.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return held.getvalue()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    index = Index()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packages, "run_pip", index.run_pip)
    monkeypatch.setattr(literature, "SHA256", hashlib.sha256(index.archive).hexdigest())
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in OF_THE_PAST.items()}
    monkeypatch.setattr(literature, "WORKS", hashes)
    return index


def made(split: Split, tokenizer: Words, seed: int = 0) -> list[documents.Document]:
    return default_documents(tokenizer, split, n_prose=2, n_code=2, n_literature=3, seed=seed, **SIZES)


def test_no_paragraph_stands_in_two_sets() -> None:
    sets = [set(prose("development")), set(prose("test")), set(calibration_text().split("\n\n"))]
    assert all(not one & other for one, other in combinations(sets, 2))
    halves = [sum(map(len, found)) for found in sets[:2]]
    assert 0.8 < halves[0] / halves[1] < 1.25


def test_no_module_and_no_work_stands_in_two_lists() -> None:
    modules = [set(texts.MODULES), *(set(MODULES[split]) for split in SPLITS)]
    assert all(not one & other for one, other in combinations(modules, 2))
    assert not set(documents.WORKS["development"]) & set(documents.WORKS["test"])
    assert {name for split in SPLITS for name in documents.WORKS[split]} == set(literature.WORKS)


@pytest.mark.parametrize("split", SPLITS)
def test_every_module_has_its_source_and_more_than_three_thousand_tokens(split: Split) -> None:
    assert len(MODULES[split]) >= 10
    for name in MODULES[split]:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        assert len(re.findall(r"\w+|[^\w\s]", source)) > 4500, name


def test_the_same_documents_come_again_and_another_seed_brings_others(index: Index) -> None:
    tokenizer = Words()
    first, again, other = (made("test", tokenizer, seed) for seed in (0, 0, 1))
    assert [tokenizer.said(d) for d in first] == [tokenizer.said(d) for d in again]
    assert all(tokenizer.said(one) != tokenizer.said(two) for one, two in zip(first, other, strict=True))
    kinds = ["prose", "prose", "code", "code", "literature alice29", "literature plrabn12", "literature alice29"]
    assert [d.name.rsplit(" ", 1)[0] for d in first] == kinds
    assert all(len(d.tokens) == 340 for d in first)


def test_development_and_test_share_no_document(index: Index) -> None:
    tokenizer = Words()
    names = [{d.name for d in made(split, tokenizer) if not d.name.startswith("prose")} for split in SPLITS]
    assert not names[0] & names[1]
    assert {name.rsplit(" ", 1)[0] for name in names[0]} == {"code", "literature asyoulik"}


def test_literature_is_fetched_once_and_its_lines_end_alike(index: Index, tmp_path: Path) -> None:
    assert work("alice29") == OF_THE_PAST["alice29"].replace("\r", "")
    assert work("plrabn12").startswith("PLRABN12\n\n")
    assert index.asked == ["brotli==1.2.1"]
    kept = tmp_path / "karhunen" / "texts" / "brotli-1.2.1"
    assert sorted(file.name for file in kept.iterdir()) == ["alice29.txt", "asyoulik.txt", "plrabn12.txt"]
    (kept / "alice29.txt").write_text("altered")
    assert work("alice29").startswith("ALICE29"), "an altered text is fetched again"
    assert len(index.asked) == 2


def test_documents_without_literature_ask_nothing_of_an_index(index: Index) -> None:
    default_documents(Words(), "test", n_prose=1, n_code=1, n_literature=0, **SIZES)
    assert index.asked == []


@pytest.mark.parametrize("trouble", ["another archive", "another text", "no text", "no archive at all"])
def test_literature_that_is_not_the_known_one_is_refused_in_one_line(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    files = {name: text.encode() for name, text in OF_THE_PAST.items()}
    if trouble == "another text":
        files["alice29"] = b"short"
    if trouble == "no text":
        del files["alice29"]
    index.archive = b"no archive" if trouble == "no archive at all" else archive_of({**files, "more": b"x"})
    if trouble != "another archive":  # the archive's hash is passed, so that what stands behind it is met
        monkeypatch.setattr(literature, "SHA256", hashlib.sha256(index.archive).hexdigest())
    with pytest.raises(ValueError, match="texts:test@1,1,0") as caught:
        made("test", Words())
    assert "\n" not in str(caught.value)
    assert [file.name for file in (tmp_path / "karhunen" / "texts").iterdir() if file.suffix != ".lock"] == []


def test_an_index_that_cannot_be_reached_is_said_and_no_fewer_documents_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, kept off every index, so that it fails at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match=r"No matching distribution found for brotli==1\.2\.1") as caught:
        made("development", Words())
    assert "\n" not in str(caught.value)


def test_pip_brings_a_source_archive_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip and an archive whose build would leave a trace, from a folder in place of an index."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name, text in (
            ("setup.py", f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup()\n"),
            ("PKG-INFO", "Metadata-Version: 2.1\nName: toy-texts\nVersion: 1.0\n"),
        ):
            member = tarfile.TarInfo(f"toy_texts-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "toy_texts-1.0.tar.gz").write_bytes(held.getvalue())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for i, sha256 in enumerate((hashlib.sha256(held.getvalue()).hexdigest(), "0" * 64)):
        scratch = tmp_path / f"work{i}"
        scratch.mkdir()
        if i:
            with pytest.raises(PackageUnavailable, match="HASHES"):
                packages.download("toy-texts==1.0", scratch / "in", scratch, lambda *_: None, sdist_sha256=sha256)
        else:
            got = packages.download("toy-texts==1.0", scratch / "in", scratch, lambda *_: None, sdist_sha256=sha256)
            assert got.read_bytes() == held.getvalue()
    assert not (tmp_path / "ran").exists()


@pytest.mark.model
def test_the_real_literature_is_what_it_should_be() -> None:
    assert "Alice was beginning to get very tired" in work("alice29")
    assert "Of Mans First Disobedience" in work("plrabn12") or "Of Man's first disobedience" in work("plrabn12")
    assert work("asyoulik").startswith("\tAS YOU LIKE IT\n")
