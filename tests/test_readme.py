"""README's Python and commands run as they stand, its lists are of what there is, its figures are those measured."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import readme_figures
from tests.cli.conftest import save_tiny
from typer.exceptions import TyperException
from typer.main import get_command

from karhunen import recipes
from karhunen.cli import run
from karhunen.cli.app import app
from karhunen.evaluation.results.composition import recipe_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 150
SAID = re.compile(r"([\d,]+) bytes became ([\d,]+): (\d\.\d\d) bits per coded element")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every `karhunen …` line of the shell blocks."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("karhunen ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def run_python(folder: Path, source: str, model: str = "smollm2") -> str:
    """README's Python in a new interpreter, as a reader types it; what it printed."""
    assert 'karhunen.load("smollm2")' in source
    source = source.replace('"smollm2"', repr(model))
    (folder / "readme.py").write_text(source, encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT / "src"), "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-W", "error::FutureWarning:__main__", "readme.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_readme_runs_on_a_tiny_model(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", hidden_size=128, num_key_value_heads=4, max_position_embeddings=8192)
    out = run_python(tmp_path, "".join(blocks("python")), str(folder))
    said = SAID.search(out)
    assert said is not None
    assert int(said[2].replace(",", "")) < int(said[1].replace(",", ""))
    assert float(said[3]) <= 2.2, "two bits asked for, and a last byte partly used"
    assert "'codes':" in out
    loading = next(line for line in blocks("python")[0].splitlines() if "karhunen.load" in line)
    later = f"import karhunen\n{loading}\n{blocks('python')[2]}"
    by_name = "model.set_attn_implementation('sdpa')\nmodel.set_attn_implementation('karhunen')\n"
    assert "'codes':" in run_python(
        tmp_path, f"{later}{by_name}model.generate(**inputs, max_new_tokens=2)", str(folder)
    )


@pytest.mark.model
def test_readme_runs_as_it_stands(tmp_path: Path) -> None:
    assert SAID.search(run_python(tmp_path, "".join(blocks("python"))))


def test_the_code_that_compresses_a_cache_is_five_lines() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) == 5


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < MOST_LINES


def parsed(words: list[str]) -> dict[str, object]:
    """What the real command line makes of the words, down to the types of options; nothing is run."""
    group: Any = get_command(app)
    context = group.make_context("karhunen", list(words))
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    return command.make_context(name, rest, parent=context).params


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_readme_is_one(words: list[str]) -> None:
    assert parsed(words)
    with pytest.raises(TyperException):
        parsed([*words, "--nonsense"])


@pytest.mark.slow
def test_the_commands_of_readme_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model in place of SmolLM2 and `./my-model`; timings are left out."""
    folder = save_tiny(tmp_path / "llama", hidden_size=128, num_key_value_heads=4, max_position_embeddings=8192)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text(" ".join(f"note {i}, which is not short" for i in range(200)))
    wanted = [words for words in commands() if words[0] != "bench"]
    assert {"calibrate", "inspect", "generate", "evaluate", "compare"} <= {words[0] for words in wanted}
    for words in wanted:
        words = [str(folder) if word == "./my-model" else word for word in words]
        if words[0] in ("calibrate", "generate", "evaluate") and not {"--model", "--statistics"} & set(words):
            words += ["--model", str(folder)]
        few = {"calibrate": ["--max-tokens", "4096"], "evaluate": ["--limit", "1", "--prefill-tokens", "600"]}
        if "--statistics" not in words:
            words += few.get(words[0], [])
        assert run(words) == 0, words


def test_every_recipe_is_listed_with_its_paper() -> None:
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("| recipe | source |")[1]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = {name: line for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert sorted(rows) == recipes.names()
    for row in recipe_rows():
        if row.source.startswith("arXiv:"):
            assert row.source in rows[row.name]


def test_the_recipes_that_readme_names_exist() -> None:
    table = README.split("## Which recipe")[1].split("## ")[0]
    named = [text for line in table.splitlines() if line.startswith("| ") for text in re.findall(r"`([^`]+)`", line)]
    named = [text for text in named if not text.startswith("karhunen fold")]
    assert len(named) >= 5
    for text in named:
        recipes.make(text)


def test_the_tables_of_readme_are_those_of_the_results() -> None:
    rows = json.loads((ROOT / "results/measured/leaderboard.json").read_text(encoding="utf-8"))
    files = [ROOT / "results/measured/speed" / f"{name}.json" for name in ("layer", "smollm2")]
    speed = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    rows = readme_figures.of_model(rows)
    for name, table in (
        ("quality", readme_figures.quality_table(rows)),
        ("speed", readme_figures.speed_table(*speed)),
    ):
        assert readme_figures.between(README, name, table) == README, "run benchmarks/readme_figures.py"
        assert 3 <= len([line for line in table.splitlines() if line.startswith("|")]) - 2 <= 10
    with pytest.raises(ValueError, match="lacks the markers"):
        readme_figures.between(README, "nothing", "")


def test_the_picture_shows_ten_methods_and_ours_is_lowest_wherever_it_is() -> None:
    rows = json.loads((ROOT / "results/measured/leaderboard.json").read_text(encoding="utf-8"))
    rows = readme_figures.of_model(rows)
    assert len(readme_figures.METHODS) == 10
    assert all(readme_figures.curve(rows, recipe) for recipe in readme_figures.METHODS)
    ours = {row["rate"]: row["kl"] for row in readme_figures.curve(rows, "karhunen")}
    for recipe in set(readme_figures.METHODS) - {"karhunen"}:
        assert all(ours[row["rate"]] < row["kl"] for row in readme_figures.curve(rows, recipe) if row["rate"] in ours)
    assert len(readme_figures.picture(rows).axes[0].lines) == 10
    assert (ROOT / "docs" / "methods.png").is_file()


def test_readme_and_changelog_say_that_speed_on_gpus_is_not_measured() -> None:
    for page in (README, *((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "docs/devices.md"))):
        assert re.search(r"speed on GPUs\s+has\s+not\s+been\s+measured", page, flags=re.IGNORECASE)


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
