"""`--device`: one that is not here is refused before any work; on one that is here the verbs say what the host says."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.conftest import Command
from tests.cli.test_plan import carded
from tests.cli.test_usage import assert_refused
from tests.closeness import assert_near
from tests.fake_device import FakeDevice, fake_device

from karhunen.evaluation.speed import measured as speed
from karhunen.hf.embedded import load
from karhunen.kernels.paths import forced

VERBS = {
    "calibrate": ["-o", "codec"],
    "generate": ["--codec", "nowhere", "-p", "x"],
    "evaluate": ["--results", "results"],
    "leaderboard": ["--results", "results"],
    "verify": ["nowhere"],
    "bench": [],
    "demo": [],
    "fold": ["-o", "folded", "--key-rank", 3, "--value-rank", 3],
    "plan": ["llama-3.1-8b", "--check", "nowhere"],
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """There, with the definitions in place of kernels, as on the host that it is compared with."""
    # torch makes no subclass of tensors in that mode
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else nullcontext())
    with torch.no_grad(), forced("naive"), fake_device() as found:
        yield found


@pytest.fixture
def asked(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Device maps that models were loaded with, by verbs that get them there."""
    found: list[Any] = []

    def load_there(screen: object, name: Path, dtype: str, device_map: Any = None) -> tuple[Any, Any]:
        found.append(device_map)
        model, tokenizer = load(name)
        return (model if device_map is None else device.model(model)), tokenizer

    for verb in ("generate", "evaluate", "bench", "fold", "plan_check"):
        monkeypatch.setattr(f"karhunen.cli.{verb}.load_model", load_there)
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_a_device_that_is_not_here_is_refused_before_any_work(
    karhunen: Command, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(karhunen(verb, *VERBS[verb], "--device", "cuda:99"), "there is no cuda:99 here: PyTorch sees cpu")
    assert_refused(karhunen(verb, *VERBS[verb], "--device", "meta"), "there is no meta here")
    assert_refused(karhunen(verb, *VERBS[verb], "--device", "gpu"), "'gpu' names no device; use cpu, cuda, cuda:1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_a_device_may_be(karhunen: Command, verb: str) -> None:
    said = " ".join(karhunen(verb, "--help").out.split())
    assert "cpu, cuda, cuda:1, mps" in said
    assert ("The device to time" if verb == "bench" else "several with commas, or auto") in said


def test_bench_times_one_device_and_threads_are_of_the_cpu(karhunen: Command, device: FakeDevice) -> None:
    assert_refused(karhunen("bench", "--device", "cpu,cuda"), "2 devices; one is timed, such as cpu")
    assert_refused(karhunen("bench", "--device", "cuda", "--threads", 2), "--threads are of the CPU")
    assert_refused(karhunen("bench", "--device", "cuda:1"), "PyTorch sees cpu, cuda:0")


def test_generate_goes_on_from_a_cache_on_its_device(
    karhunen: Command, codec_folder: Path, model_folder: Path, asked: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("karhunen.hf.session.weights_fingerprint", lambda model: "by address, of which there is none")
    said = []
    for name in ("cpu", "cuda"):
        start = ["generate", "--codec", codec_folder, "--model", model_folder, "--raw", "--json", "--device", name]
        start += ["--max-new-tokens", 4, "--session", tmp_path / name]
        for prompt in ("a prompt that is long enough to be coded " * 2, "and then?"):
            done = karhunen(*start, "-p", prompt)
            assert done.code == 0, done.err
            said.append(json.loads(done.out))
    assert asked == [None, None, {"": "cuda:0"}, {"": "cuda:0"}]
    assert [found["device"] for found in said] == ["cpu", "cpu", "cuda:0", "cuda:0"]
    assert [found["text"] for found in said[:2]] == [found["text"] for found in said[2:]]
    assert said[1]["restored_tokens"] == said[3]["restored_tokens"] > 0
    assert [found["cache"]["bytes"] for found in said[:2]] == [found["cache"]["bytes"] for found in said[2:]]


def test_evaluate_scores_on_its_device_what_it_scores_on_the_host(
    karhunen: Command, model_folder: Path, text_file: Path, asked: list[Any], tmp_path: Path
) -> None:
    found = []
    for name in ("cpu", "cuda"):
        done = karhunen(
            "evaluate", "--model", model_folder, "--recipe", "int4:group=8", "--task", text_file, "--limit", 1,
            "--prefill-tokens", 160, "--scored-tokens", 24, "--generated-tokens", 6, "--window", "4,16",
            "--results", tmp_path / name, "--device", name,
        )  # fmt: skip
        assert done.code == 0, done.err
        (result,) = (tmp_path / name).rglob("int4@*.json")
        found.append(json.loads(result.read_text()))
    assert asked == [None, {"": "cuda:0"}]
    assert [result["made"]["device"] for result in found] == ["cpu", "cuda:0 fake"]
    assert found[0]["configuration"] == found[1]["configuration"]
    assert found[0]["metrics"]["kl"]["mean"] > 1e-5
    assert found[1]["metrics"]["kl"]["mean"] == pytest.approx(found[0]["metrics"]["kl"]["mean"], rel=1e-3)
    assert found[1]["continuation"] == found[0]["continuation"]
    assert found[1]["cache"]["bytes"] == found[0]["cache"]["bytes"]


def test_bench_waits_for_the_device_before_and_after_every_contender(
    karhunen: Command, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "DEVICE_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(speed.Timings, "median", lambda self, name: 1 + list(self.milliseconds).index(name))
    done = karhunen("bench", "--shape", "2x2x16", "--tokens", 200, "--rounds", 3, "--device", "cuda", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    (row,) = said["rows"]
    n_copies, n_contenders = 5, len(row["milliseconds"])
    assert device.n_synchronized == 2 * (n_copies + 3 * n_contenders)
    assert said["device"] == "cuda:0 fake"
    assert said["kernels"] == "naive: forced"
    assert row["device"] == "cuda:0"
    assert row["how_read"] == "bytes, naive path (forced)"
    assert row["output_error"] < 1e-4
    assert row["fastest_dense"] == "sdpa_float32", "of three dense ones the first, by the clock above"


def test_bench_times_a_models_steps_on_its_device(
    karhunen: Command, codec_folder: Path, model_folder: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "DEVICE_COPY_BYTES", 1 << 16)
    start = ["bench", "--codec", codec_folder, "--model", model_folder, "--tokens", 120, "--rounds", 1, "--json"]
    done = karhunen(*start, "--device", "cuda")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    assert asked == [{"": "cuda:0"}]
    assert row["device"] == "cuda:0"
    assert set(row["milliseconds"]) == {"dynamic", "static", "bytes"}
    assert row["bytes_read"] < row["dense_bytes_read"]


@pytest.mark.parametrize("corrected", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_model_is_folded_on_its_device(
    karhunen: Command, codec_folder: Path, model_folder: Path, text_file: Path, asked: list[Any], tmp_path: Path,
    corrected: bool,
) -> None:  # fmt: skip
    how = ["--codec", codec_folder, "--correct-output"] if corrected else ["--key-rank", 3, "--value-rank", 4]
    weights = []
    for name in ("cpu", "cuda"):
        done = karhunen(
            "fold", "--model", model_folder, "--text", text_file, "--max-tokens", 1024 if corrected else 300, *how,
            "-o", tmp_path / name, "--device", name, "--json",
        )  # fmt: skip
        assert done.code == 0, done.err
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert asked == [None, {"": "cuda:0"}]
    assert json.loads(done.out)["device"] == "cuda:0"
    assert weights[0].keys() == weights[1].keys()
    for name, found in weights[1].items():
        assert_near(found, weights[0][name], 1e-4)


def test_a_plan_is_checked_on_the_device(
    karhunen: Command, codec_folder: Path, model_folder: Path, asked: list[Any], tmp_path: Path
) -> None:
    codec = carded(codec_folder, tmp_path / "codec", 0.99)
    start = ["plan", model_folder, "--ratio", 5, "--device", "cuda"]
    assert_refused(karhunen(*start), "--device cuda says where --check runs the model; give --check")
    done = karhunen(*start, "--check-tokens", 256, "--max-step", 1e6, "--check", codec, "--json")
    assert done.code == 0, done.out + done.err
    assert asked == [{"": "cuda:0"}]
    lines = {line["name"]: line for line in json.loads(done.out)["check"]["lines"]}
    assert lines["step time"]["passed"]
