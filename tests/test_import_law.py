"""Imports point one way, held by reading every source file; and `import karhunen` stays light, held by doing it."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "karhunen"

LAYERS = (
    ("cli",),
    ("serving", "evaluation"),
    ("adaptation",),
    ("monitoring", "planning", "calibration"),
    ("hf",),
    ("recipes",),
    ("fitting",),
    ("recipe",),
    ("attention", "pages"),
    ("store",),
    ("codec",),
    ("windows", "packing"),
    ("quantizers",),
    ("allocation",),
    ("transforms",),
    ("frames",),
    ("metrics",),
    ("statistics",),
)
"""Highest first. A part imports itself and lower layers; parts side by side do not know each other."""

LEAVES = {
    "kernels": "quantizers",
    "values": "statistics",
    "device": "statistics",
    "folder": "statistics",
    "stores": "hf",
    "card": "codec",
    "byte_sizes": "calibration",
}
"""Import nothing of karhunen but themselves; each with the lowest layer that may import it (those above may too)."""

ONLY_IMPORTERS = {
    "transformers": {"hf"},
    "huggingface_hub": {"hf"},
    "lm_eval": {"evaluation"},
    "vllm": {"serving"},
    "lmcache": {"serving"},
    "sglang": {"serving"},
    "redis": {"stores"},
    "fsspec": {"stores"},
}
HEAVY = ("transformers", "numba", "triton", "vllm", "lmcache", "prometheus_client")
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
CACHE_FOLDER_READER = Path("hf") / "embedded.py"
HANDS_IT_ON = Path("hf") / "packages.py"  # whole, to pip

DEPTH = {part: depth for depth, parts in enumerate(LAYERS) for part in parts}


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def relative(file: Path) -> Path:
    return file.relative_to(SOURCE)


def part_of(file: Path) -> str:
    """Top-level part a file belongs to: a folder's name, a module's name, or `__init__` for the package itself."""
    return relative(file).with_suffix("").parts[0]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def imported_modules(file: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in the file, functions and TYPE_CHECKING included.

    `from karhunen import codec` counts as `karhunen.codec`.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append((node.lineno, "." * node.level + (node.module or "")))
            elif node.module == "karhunen":
                found += [(node.lineno, f"karhunen.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module or ""))
    return found


def allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer in LEAVES:
        return False
    if imported in LEAVES:
        return DEPTH[importer] <= DEPTH[LEAVES[imported]]
    return imported in DEPTH and DEPTH[importer] < DEPTH[imported]


def test_every_part_has_a_place_in_the_law() -> None:
    parts = {part_of(file) for file in source_files()} - {"__init__", "__main__"}
    homeless = sorted(parts - DEPTH.keys() - LEAVES.keys())
    assert not homeless, f"give {homeless} a place in LAYERS, or put their files where they belong"


def test_imports_point_one_way() -> None:
    breaches = [
        f"{relative(file)}:{line}: {part_of(file)} imports {module}"
        for file in source_files()
        if part_of(file) not in ("__init__", "__main__")
        for line, module in imported_modules(file)
        if module.split(".")[0] == "karhunen"
        and not (len(module.split(".")) > 1 and allowed(part_of(file), module.split(".")[1]))
    ]
    assert not breaches, "\n".join(breaches)


def test_imports_are_absolute() -> None:
    breaches = [
        f"{relative(file)}:{line}: {module}"
        for file in source_files()
        for line, module in imported_modules(file)
        if module.startswith(".")
    ]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("library", sorted(ONLY_IMPORTERS))
def test_a_heavy_library_is_imported_by_one_part_only(library: str) -> None:
    breaches = [
        f"{relative(file)}:{line}: imports {module}"
        for file in source_files()
        for line, module in imported_modules(file)
        if module.split(".")[0] == library and part_of(file) not in ONLY_IMPORTERS[library]
    ]
    assert not breaches, "\n".join(breaches)


def test_import_karhunen_is_light() -> None:
    code = f"import json, sys, karhunen; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=SOURCE.parent,  # so that this tree is what is imported
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_no_file_is_named_for_nothing() -> None:
    named = [str(relative(path)) for path in SOURCE.rglob("*") if path.stem.strip("_") in EMPTY_NAMES]
    assert not named, f"name these by their noun: {named}"


def test_only_the_command_line_prints() -> None:
    breaches = [
        f"{relative(file)}:{node.lineno}"
        for file in source_files()
        if part_of(file) != "cli"
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not breaches, f"print( outside cli/: {breaches}"


def reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv"}
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and not names.isdisjoint(alias.name for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in names


def test_no_environment_variable_is_configuration() -> None:
    breaches = [
        f"{relative(file)}:{node.lineno}"
        for file in source_files()
        if relative(file) not in (CACHE_FOLDER_READER, HANDS_IT_ON)
        for node in ast.walk(tree_of(file))
        if reads_environment(node) and isinstance(node, ast.Attribute | ast.ImportFrom)
    ]
    assert not breaches, f"the environment is read outside {CACHE_FOLDER_READER}: {breaches}"


def test_the_cache_folder_is_all_that_is_read_from_the_environment() -> None:
    """`environ.get("XDG_CACHE_HOME")`, and `**environ` handed on whole to a subprocess; no other key."""
    keys = {
        node.args[0].value
        for file in (CACHE_FOLDER_READER, HANDS_IT_ON)
        for node in ast.walk(tree_of(SOURCE / file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "getenv")
        and ast.unparse(node.func).startswith("os.")
        and isinstance(node.args[0], ast.Constant)
    }
    assert keys == {"XDG_CACHE_HOME"}
