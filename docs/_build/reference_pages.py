"""The reference: the public names on one page, then one page for each folder of the package, from docstrings."""

import ast
from pathlib import Path

UNLISTED = ("cli", "recipes")
"""The command line says what it does by --help; recipes have pages of their own."""


def pages(package: Path) -> dict[str, str]:
    """Markdown by path, for mkdocstrings to fill in."""
    found = {"reference/index.md": _public(package)}
    for folder, modules in _modules(package).items():
        parts = [f"# {folder}\n"]
        parts += [f"::: {name}\n    options: {{show_root_full_path: true}}\n" for name in modules]
        found[f"reference/{folder}.md"] = "\n".join(parts)
    return found


def nav(package: Path) -> list[object]:
    """The reference's part of the navigation."""
    return ["reference/index.md", *({folder: f"reference/{folder}.md"} for folder in _modules(package))]


def _public(package: Path) -> str:
    """What `karhunen.NAME` is, in the order in which the package lists it."""
    tree = ast.parse((package / "__init__.py").read_text("utf-8"))
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_HOME" for t in node.targets)
    )
    homes: dict[str, str] = ast.literal_eval(table)
    names = "\n".join(f"::: {home}.{name}\n" for name, home in homes.items() if name != "names")
    return (
        "# Public names\n\nEach of these is also `karhunen.NAME`: `karhunen.fit` is `karhunen.fitting.fit`. The other pages "
        f"of the reference hold what they are made of, folder by folder.\n\n{names}"
    )


def _modules(package: Path) -> dict[str, list[str]]:
    """Dotted names of the modules that have something public to say, by folder."""
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        folder = inside.parts[0] if len(inside.parts) > 1 else "karhunen"
        if folder in UNLISTED or inside.name.startswith("_") or not _says_something(path):
            continue
        dotted = ".".join(("karhunen", *inside.with_suffix("").parts))
        found.setdefault(folder, []).append(dotted)
    return found


def _says_something(path: Path) -> bool:
    body = ast.parse(path.read_text("utf-8")).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and not node.name.startswith("_") for node in body)
