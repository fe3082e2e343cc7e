"""`karhunen calibrate`: what it says of memory beforehand, and that torchrun's processes write what one does."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Command, Finished, save_tiny
from tests.cli.test_usage import assert_refused
from tests.cli.test_verbs import document

from karhunen.codec import Codec


def test_the_plan_is_shown_and_nothing_is_written(karhunen: Command, model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "codec"
    done = karhunen("calibrate", "--model", model_folder, "--plan", "-o", output)
    assert done.code == 0, done.err
    for word in ("weights", "statistics", "or gradients: inputs of layers", "at the peak", "free"):
        assert word in done.out
    assert "memory: cpu " in done.out
    assert not output.exists()


def test_a_plan_for_devices_that_are_not_here_takes_their_memory_from_the_user(
    karhunen: Command, model_folder: Path
) -> None:
    arguments = ["calibrate", "--model", model_folder, "--plan", "--device", "cuda:0", "--json"]
    done = karhunen(*arguments, "--memory", "1GB", "--batch", 3)
    assert done.code == 0, done.err
    said = document(done.out)
    assert [device["device"] for device in said["devices"]] == ["cuda:0", "cpu"]
    assert said["devices"][0]["free"] == 10**9
    assert said["devices"][0]["statistics"] == said["devices"][1]["weights"] == 0
    assert said["batch"] == 3
    assert_refused(karhunen(*arguments), "there is no cuda:0 here")


def test_what_does_not_fit_is_refused_before_the_weights_are_read(
    karhunen: Command, model_folder: Path, tmp_path: Path
) -> None:
    arguments = ["calibrate", "--model", model_folder, "-o", tmp_path / "codec"]
    assert_refused(karhunen(*arguments, "--memory", "100kB"), "calibration does not fit", "--dtype bfloat16")
    assert_refused(karhunen(*arguments, "--memory", "much"), "'much' is no size of memory")
    assert_refused(karhunen(*arguments, "--device", "gpu"), "'gpu' names no device")
    assert_refused(karhunen("calibrate", "--plan", "--statistics", tmp_path), "--statistics fits what was measured")
    assert not (tmp_path / "codec").exists()


def test_the_memory_is_said_in_one_line_before_it_is_taken(
    karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    arguments = ["calibrate", "--model", model_folder, "--text", text_file, "--recipe", "int4:group=8"]
    done = karhunen(*arguments, "-o", tmp_path / "codec", "--sequence-tokens", 128, "--max-tokens", 512)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("memory: ")]
    assert line.endswith("1 sequence of up to 128 tokens at a time")


def torchrun(n_processes: int, *arguments: object) -> Finished:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_processes)]
    done = subprocess.run(
        [*launcher, "-m", "karhunen", *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_two_processes_of_torchrun_write_what_one_writes(
    karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    arguments = ["calibrate", "--model", model_folder, "--text", text_file, "--sequence-tokens", 300]
    one = karhunen(*arguments, "-o", tmp_path / "one")
    assert one.code == 0, one.err
    two = torchrun(2, *arguments, "-o", tmp_path / "two")
    assert two.code == 0, two.err
    assert len(two.out.splitlines()) == 1, "the first process alone prints"
    assert "at a time; 2 processes" in two.err
    assert (
        Codec.from_pretrained(tmp_path / "two").fingerprint() == Codec.from_pretrained(tmp_path / "one").fingerprint()
    )
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_torchrun_ends_with_one_line_of_ours(tmp_path: Path, text_file: Path) -> None:
    folder = save_tiny(tmp_path / "bloom", "bloom")
    done = torchrun(2, "calibrate", "--model", folder, "--text", text_file, "-o", tmp_path / "codec")
    assert done.code != 0
    assert done.out == ""
    ours = [line for line in done.err.splitlines() if line.startswith("karhunen: ")]
    assert len(ours) == 1, done.err
    assert "bloom has no RoPE" in ours[0]
