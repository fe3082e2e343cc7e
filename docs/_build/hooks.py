"""What `make docs` does beside mkdocs: pages made from files outside docs/, links that lead there, no network.

README, CHANGELOG, CONTRIBUTING ─▶ pages of the site;   recipe files ─▶ one page each (recipe_pages.py)
source files ─▶ the reference, one page for each folder;   the finished site ─▶ refused if it asks a network for anything
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

import recipe_pages  # noqa: E402  # beside this file
import reference_pages  # noqa: E402

COPIED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
EXPECTED = ("reliability.md", "tasks.md", "progressive.md")
"""Pages that have their place in the navigation before they are written; until then it goes without them."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ASKS_A_NETWORK = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\ssrc=[\"']?(?:https?:)?//|<link\b[^>]*\shref=[\"']?https?:")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out expected pages that are not there yet; append those that the navigation does not name."""
    folder = Path(config.docs_dir)
    absent = {name for name in EXPECTED if not (folder / name).exists()}
    named: set[str] = set()
    nav = [kept for entry in config.nav or [] if (kept := _pruned(entry, absent, named)) is not None]
    if unnamed := sorted(path.name for path in folder.glob("*.md") if path.name not in named):
        nav.append({"More": list(unnamed)})
    config.nav = _with_recipes(nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the pictures under results/."""
    made = {COPIED[name]: (ROOT / name).read_text("utf-8") for name in COPIED}
    made |= recipe_pages.pages(ROOT) | reference_pages.pages(ROOT / "src" / "karhunen")
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for picture in sorted((ROOT / "results").rglob("*.png")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links as they are right in the repository become links that are right in the site."""
    source = page.file.src_uri
    if source == "recipes.md":
        markdown = recipe_pages.with_links(markdown)
    base = ROOT if source in COPIED.values() else ROOT / "docs" / Path(source).parent
    depth = "../" * source.count("/")

    def rewritten(found: re.Match[str]) -> str:
        bang, words, target = found.groups()
        path, mark, anchor = target.partition("#")
        if not path or "://" in path:
            return found[0]
        place = (base / path).resolve()
        if not place.is_relative_to(ROOT):
            return found[0]
        name = place.relative_to(ROOT).as_posix()
        if name.startswith("docs/"):
            return f"{bang}[{words}]({depth}{name.removeprefix('docs/')}{mark}{anchor})"
        if name in COPIED:
            return f"{bang}[{words}]({depth}{COPIED[name]}{mark}{anchor})"
        if bang:
            return f"![{words}]({depth}{name})"
        if not place.exists():
            return found[0]
        return words if name in words else f"{words} (`{name}`)"

    return LINK.sub(rewritten, markdown)


def on_post_build(*, config: MkDocsConfig, **_: Any) -> None:
    """The site works from disk: PluginError if a page loads anything from elsewhere."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        if found := ASKS_A_NETWORK.search(page.read_text("utf-8")):
            raise PluginError(f"{page} asks a network: {found[0]}; keep what it needs in docs/assets")


def _pruned(entry: Any, absent: set[str], named: set[str]) -> Any:
    if isinstance(entry, dict):
        title, rest = next(iter(entry.items()))
        kept = [x for e in rest if (x := _pruned(e, absent, named))] if isinstance(rest, list) else _pruned(rest, absent, named)
        return {title: kept} if kept else None
    named.add(entry)
    return None if entry in absent else entry


def _with_recipes(nav: list[Any]) -> list[Any]:
    """The pages of single recipes stand below the table of all."""
    for entry in nav:
        if isinstance(entry, dict) and "Recipes" in entry:
            entry["Recipes"].append({"Each recipe": [f"recipes/{name}.md" for name in recipe_pages.names(ROOT)]})
        if isinstance(entry, dict) and "Reference" in entry:
            entry["Reference"] = reference_pages.nav(ROOT / "src" / "karhunen")
    return nav
