"""Every file of examples/ runs, on a tiny model in place of SmolLM2, and docs/examples.md shows it as it is."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cli.conftest import save_tiny

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
MOST_LINES = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("examples") / "llama"
    return str(save_tiny(folder, hidden_size=64, max_position_embeddings=4096))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(said: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", said)]


def test_a_cache_is_compressed(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("compress_a_cache").main(tiny, calibration_tokens=1024, prompt_letters=600)
    n_prompt, dense, held, bits, _ = numbers(capsys.readouterr().out)
    assert n_prompt == 600
    assert held < dense / 1.5
    assert bits == pytest.approx(2, abs=0.2)


def test_text_of_ones_own_calibrates(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("The boat leaves at seven, and Ada brings the bread. " * 60)
    module = example("calibrate_on_your_text")
    module.main(str(tmp_path), tiny, calibration_tokens=1024, read_tokens=400)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].strip() for line in said] == [
        "calibrated on the built-in text", "calibrated on your text"
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="too short"):
        module.main(str(tmp_path), tiny, read_tokens=4000)


def test_a_conversation_goes_on(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = example("chat_with_a_session").main
    chat(str(tmp_path / "chat"), tiny)
    assert "restored 0 tokens" in capsys.readouterr().out
    chat(str(tmp_path / "chat"), tiny)
    restored, n_read, *_ = numbers(capsys.readouterr().out)
    assert restored > 1000 > n_read


def test_a_recipe_is_written(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("write_a_recipe").main(tiny, prompt_letters=600)
    needs, bits = numbers(capsys.readouterr().out)
    assert needs == 0
    assert bits == pytest.approx(3 + 32 / 16), "four and two bits, and a range of 32 bits for 16 numbers"


def test_two_methods_are_compared(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("compare_two_methods").main("int4:group=16", "int2:group=16", tiny, read_tokens=400, n_scored=32)
    _, four, two = capsys.readouterr().out.splitlines()
    assert float(four.split()[1]) == 4 + 32 / 16
    assert float(two.split()[1]) == 2 + 32 / 16
    assert float(four.split("KL")[1].split()[0]) < float(two.split("KL")[1].split()[0])


def test_a_codec_is_shared_and_its_bit_plan_drawn(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'karhunen[plots]'")
    folder = tmp_path / "codec"
    example("share_a_codec").main(str(folder), tiny)
    said = capsys.readouterr().out
    assert "the same codec: True" in said
    assert "refused: " in said
    example("plot_a_bit_plan").main(str(folder), str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 0
    assert "keys: 4.00 to 4.00 bits" in capsys.readouterr().out


def test_the_notebook_runs_from_top_to_bottom(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'karhunen[plots]'")
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "clear the outputs before you commit: they differ from machine to machine"
            source = (
                "".join(cell["source"]).replace('"smollm2"', repr(tiny)).replace("max_tokens=4096", "max_tokens=1024")
            )
            source = source.replace("[:4000]", "[:600]")
            exec(compile(source, "first_steps.ipynb", "exec"), names)
    assert re.search(r"[\d,]+ bytes became [\d,]+\n.*\nKL \d\.\d{4} nats", capsys.readouterr().out, flags=re.DOTALL)
    assert len(names["axes"].lines) == 2


def test_every_example_is_short_tested_and_shown() -> None:
    shown = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) >= 7
    for file in files:
        source = file.read_text(encoding="utf-8")
        assert len(source.splitlines()) < MOST_LINES
        assert f'example("{file.stem}")' in tests, f"{file.name} is run by no test here"
        assert f"```python\n{source}```" in shown, (
            f"run benchmarks/examples_page.py: docs/examples.md lacks {file.name}"
        )
