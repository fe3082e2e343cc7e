"""docs/architecture.md draws the tree as it is, and the order of imports that the law holds."""

import re
from pathlib import Path

from tests.test_import_law import LAYERS, LEAVES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "src" / "karhunen"


def drawn() -> set[str]:
    """Names below src/karhunen/ in the page's tree; folders end in a slash."""
    tree = PAGE.read_text(encoding="utf-8").split("src/karhunen/\n", 1)[1].split("```", 1)[0]
    return set(re.findall(r"^  (\S+)  +\S", tree, flags=re.MULTILINE))


def found() -> set[str]:
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("**/*.py"))}
    return folders | {path.name for path in PACKAGE.glob("*.py")}


def test_the_tree_is_as_it_is_drawn() -> None:
    unknown, gone = sorted(found() - drawn()), sorted(drawn() - found())
    assert not unknown, f"add a line for {', '.join(unknown)} to the tree in docs/architecture.md"
    assert not gone, f"take {', '.join(gone)} out of the tree in docs/architecture.md: src/karhunen has it no more"


def test_rooms_are_as_they_are_drawn() -> None:
    """Folders within a folder, where the page draws any."""
    tree = PAGE.read_text(encoding="utf-8").split("src/karhunen/\n", 1)[1].split("```", 1)[0]
    drawn_rooms: dict[str, set[str]] = {}
    folder = ""
    for line in tree.splitlines():
        if found := re.match(r"  (\S+)/ ", line):
            folder = found[1]
        elif found := re.match(r"    (\S+)/ ", line):
            drawn_rooms.setdefault(folder, set()).add(found[1])
    assert {"kernels", "evaluation"} <= set(drawn_rooms)
    for name, rooms in drawn_rooms.items():
        there = {path.name for path in (PACKAGE / name).iterdir() if path.is_dir() and any(path.glob("*.py"))}
        assert there == rooms, f"{name}/ has {sorted(there)}, docs/architecture.md draws {sorted(rooms)}"


def test_every_folder_at_the_top_is_drawn() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for folder in ("tests", "benchmarks", "examples", "results", "docs"):
        assert (ROOT / folder).is_dir()
        assert re.search(rf"^{folder}/ ", text, flags=re.MULTILINE), f"add {folder}/ to docs/architecture.md"


def test_the_order_of_imports_is_the_law_s() -> None:
    text = PAGE.read_text(encoding="utf-8")
    order = text.split("cli > ", 1)[1].split("```", 1)[0]
    said = [part.strip() for part in ("cli > " + order).replace("\n", " ").split(">")]
    assert [tuple(re.split(r", *", part)) for part in said] == [tuple(layer) for layer in LAYERS], (
        "write the order of LAYERS in tests/test_import_law.py into docs/architecture.md"
    )
    leaves = text.split("```")[-1]
    for leaf in LEAVES:
        assert f"`{leaf}`" in leaves, f"name the leaf {leaf} in docs/architecture.md"
