"""The page on adding a recipe is run as it stands."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from karhunen.quantizers.base import QuantizerData

PAGE = (Path(__file__).parent.parent / "docs" / "adding_a_recipe.md").read_text(encoding="utf-8")


def run() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(code, "adding_a_recipe.md", "exec"), names)
    return names


def test_the_toy_method_takes_the_bits_and_makes_the_error_that_the_page_says() -> None:
    found = run()
    assert found["bits"] == 1 + 16 / 64
    assert found["error"] == pytest.approx(1 - 2 / math.pi, rel=0.02)
    with pytest.raises(ValueError, match=r"a sign takes 1 bit, not 2; use Uniform\(1\)"):
        found["Sign"]().fit(QuantizerData(torch.full((1, 4), 2.0)))


def test_the_page_is_one_page() -> None:
    assert len(PAGE.splitlines()) < 160
