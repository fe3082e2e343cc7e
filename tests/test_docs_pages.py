"""The Python of the tutorial and the how-to runs, block after block, on a tiny model; their commands parse."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cli.conftest import save_tiny
from typer.main import get_command

import karhunen
from karhunen import recipes
from karhunen.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("tutorial", "howto")


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("pages") / "llama", hidden_size=64, max_position_embeddings=4096))


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for source in blocks(page, "python"):
        source = source.replace('"smollm2"', repr(tiny)).replace("max_tokens=4096", "max_tokens=1024")
        exec(compile(source.replace("[:4000]", "[:700]"), f"{page}.md", "exec"), names)
    assert names["session"].report().total.coded_bits_per_element > 0
    if page == "tutorial":
        assert 0 < float(names["found"].kl.mean()) < float("inf")
        assert names["again"].fingerprint() == names["codec"].fingerprint()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_commands(page: str) -> None:
    fenced = [line for block in blocks(page, "sh") for line in block.splitlines()]
    inline = re.findall(r"`(karhunen [a-z][^`]*)`", (DOCS / f"{page}.md").read_text(encoding="utf-8"))
    commands = [shlex.split(line, comments=True)[1:] for line in [*fenced, *inline] if line.startswith("karhunen ")]
    assert commands
    group: Any = get_command(app)
    for words in commands:
        context = group.make_context("karhunen", list(words))
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        if rest or name == "recipes":
            assert command.make_context(name, rest, parent=context).params is not None


def built(name: str) -> ModuleType:
    """A part of the site's build, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_build" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_recipe_has_a_page_with_its_choices_and_no_picture_is_of_none() -> None:
    pages = built("recipe_pages").pages(DOCS.parent)
    assert sorted(pages) == [f"recipes/{name}.md" for name in recipes.names()]
    for name in recipes.names():
        page, recipe = pages[f"recipes/{name}.md"], recipes.make(name)
        assert f"| window | `{type(recipe.window).__name__}" in page
        assert (recipe.key is None) or f"| quantizer | `{type(recipe.key.quantizer).__name__}" in page
    assert "b_i = max(0, ½ log2(λ_i / θ))" in pages["recipes/spectra.md"]
    assert {path.stem for path in (DOCS / "pictures" / "bits").glob("*.svg")} <= set(recipes.names())


def test_the_reference_has_the_public_names_and_every_folder() -> None:
    package = DOCS.parent / "src" / "karhunen"
    pages = built("reference_pages").pages(package)
    public = re.findall(r"^::: (\S+)\.(\w+)$", pages["reference/index.md"], flags=re.MULTILINE)
    assert {name for _, name in public} == set(karhunen.__all__) - {"__version__", "names"}
    folders = {path.name for path in package.iterdir() if any(path.glob("[!_]*.py"))} - {"cli", "recipes"}
    assert {f"reference/{folder}.md" for folder in folders} <= set(pages)


def test_every_file_that_says_the_version_says_the_same() -> None:
    root = DOCS.parent
    said = {
        name: re.findall(pattern, (root / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name, pattern in (("pyproject.toml", r'^version = "(.*)"$'), ("CITATION.cff", r"^version: (.*)$"))
    }
    assert said == {"pyproject.toml": [karhunen.__version__], "CITATION.cff": [karhunen.__version__]}
