"""CONTRIBUTING's way to run without AVX-512 leaves none of it in what Numba compiles."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILED = """
import numba, numpy

@numba.njit(fastmath=True)
def product(a, b):
    total = numpy.float32(0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total

product(numpy.ones(64, numpy.float32), numpy.ones(64, numpy.float32))
from karhunen.kernels.scan import isa
print(isa.description())
print(*product.inspect_asm().values())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX is of x86")
def test_the_two_lines_of_contributing_turn_avx512_off() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    asked = dict(re.findall(r"([A-Z_]+)=(\S+)", "\n".join(re.findall(r"^export .*", page, flags=re.MULTILINE))))
    assert {"ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} <= asked.keys()
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, **asked, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    said, _, compiled = done.stdout.partition("\n")
    assert said == "AVX2"
    assert "ymm" in compiled
    assert "zmm" not in compiled
