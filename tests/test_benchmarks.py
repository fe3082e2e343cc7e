"""Scripts in benchmarks/ name what exists, so that moving a function cannot leave one of them behind."""

import ast
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def named(module: ModuleType, name: str) -> object:
    """What `from module import name` would bind; AttributeError if nothing."""
    full = f"{module.__name__}.{name}"
    return getattr(module, name) if hasattr(module, name) or not util.find_spec(full) else import_module(full)


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.stem)
def test_every_name_of_the_library_exists(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "karhunen":
            for alias in node.names:
                found = named(import_module(node.module), alias.name)
                if isinstance(found, ModuleType):
                    modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"{file.name}:{node.lineno}: {ast.unparse(node)}"
