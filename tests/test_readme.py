"""README's Python runs as it stands, and what it lists is what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import save_tiny

from karhunen import recipes
from karhunen.evaluation.composition import recipe_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run_blocks(replacements: dict[str, str]) -> None:
    """All Python of README in one namespace, as a reader runs it from top to bottom."""
    names: dict[str, Any] = {}
    for source in blocks("python"):
        for old, new in replacements.items():
            source = source.replace(old, new)
        exec(compile(source, "README.md", "exec"), names)


def test_readme_runs_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "llama", hidden_size=128, num_key_value_heads=4, max_position_embeddings=8192)
    monkeypatch.chdir(tmp_path)
    assert any('karhunen.load("smollm2")' in block for block in blocks("python"))
    run_blocks({'karhunen.load("smollm2")': f"karhunen.load({str(folder)!r})"})
    said = re.search(r"([\d,]+) bytes became ([\d,]+): (\d\.\d\d) bits per coded element", capsys.readouterr().out)
    assert said is not None
    assert int(said[2].replace(",", "")) < int(said[1].replace(",", ""))
    assert float(said[3]) <= 2.2, "two bits asked for, and a last byte partly used"


@pytest.mark.model
def test_readme_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks({})
    assert re.search(r"bytes became [\d,]+: [12]\.\d\d bits per coded element", capsys.readouterr().out)


def test_the_code_that_compresses_a_cache_is_ten_lines() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10


def test_readme_lists_every_recipe_with_its_paper() -> None:
    table = README.split("## Recipes")[1].split("## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = {name: line for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert sorted(rows) == recipes.names()
    for row in recipe_rows():
        if row.source.startswith("arXiv:"):
            assert row.source in rows[row.name]


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
