"""The scripts about GPUs run on a machine without one, and what they wrote is what the documentation says."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parent.parent
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests what runs where there is no GPU")


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *arguments],
        capture_output=True, text=True, timeout=800, cwd=ROOT, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@no_gpu
@pytest.mark.slow
def test_the_check_runs_under_the_interpreter_and_says_that_its_times_mean_nothing(tmp_path: Path) -> None:
    done = script("gpu_check.py", "--small", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every kernel agrees with its definition" in done.stdout
    assert done.stdout.rstrip().endswith("say nothing about a GPU")
    found = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert found.keys() == {"correct", "copy", "dense", "bytes", "coding", "step"}
    assert all(row["right"] for row in found["correct"])
    assert [row["case"].split("  ")[-1] for row in found["bytes"]] == [
        "additive", "additive, folded", "free", "overlapping", "float16"
    ]  # fmt: skip
    assert found["step"][0]["read"] == "bytes, gpu path (forced)"


@no_gpu
def test_the_check_asks_for_small_shapes_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert import_module("gpu_check").main() == 2
    assert capsys.readouterr().err.strip() == "no GPU here; --small runs small shapes under Triton's interpreter"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "arch"), [("additive, tile 64", "90"), pytest.param("frames", "80", marks=pytest.mark.long)]
)
def test_kernels_compile_without_a_gpu(kernel: str, arch: str) -> None:
    done = script("gpu_compile.py", "--kernel", kernel, "--arch", arch)
    assert done.returncode == 0, done.stderr
    name, architecture, registers, _, _, _, products, *_ = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert kernel in name
    assert architecture == f"sm_{arch}"
    assert 0 < int(registers) <= 255
    assert int(products) > 0, "tensor cores multiply"


def test_the_page_of_compiled_kernels_says_what_was_measured() -> None:
    found = json.loads((ROOT / "results/measured/gpu_kernels.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/gpu_kernels.md").read_text(encoding="utf-8")
    assert {row["commit"] for row in found["rows"]} <= set(page.replace("|", " ").split())
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "sm_" in line and line.startswith("|")]
    assert rows == [[str(x) for x in row.values()] for row in found["rows"]]
    assert {row["arch"] for row in found["rows"]} == {"sm_80", "sm_90", "sm_100"}
