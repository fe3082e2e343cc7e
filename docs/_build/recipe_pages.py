"""A page for each recipe, made from its file: what it is, its choices on each axis, their equations, its bits.

docstring ─▶ what is reproduced;   recipe ─▶ choices by axis ─▶ the parts' own equations;   docs/pictures/bits ─▶ picture
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

AXES = ("frame", "metric", "transform", "allocation", "quantizer", "packing")
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|", flags=re.MULTILINE)
PAGE = re.compile(r"`?docs/([\w-]+)\.md`?")
NAME = re.compile(r"`(\w+)`")


def names(root: Path) -> list[str]:
    """Every recipe there is, by its file."""
    return sorted(p.stem for p in (root / "src/karhunen/recipes").glob("*.py") if not p.stem.startswith("_"))


def with_links(markdown: str) -> str:
    """The table of recipes with each name a link to its page."""
    return ROW.sub(lambda row: "| " + NAME.sub(r"[`\1`](recipes/\1.md)", row[1]) + " |", markdown)


@cache
def pages(root: Path) -> dict[str, str]:
    """Markdown by path."""
    return {f"recipes/{name}.md": _page(root, name) for name in names(root)}


def _page(root: Path, name: str) -> str:
    from karhunen import recipes
    from karhunen.evaluation.results.composition import choice

    made, function = recipes.make(name), recipes.maker(name)
    text = inspect.getdoc(inspect.getmodule(function)) or ""
    title, _, rest = text.partition("\n")
    options = inspect.signature(function).parameters.values()
    rest = PAGE.sub(r"[\1](../\1.md)", rest)
    parts = [f"# {name}\n", f"**{title.strip()}**\n", rest.strip() + "\n", inspect.getdoc(function) or "", ""]
    picture = root / "docs" / "pictures" / "bits" / f"{name}.svg"
    if picture.exists():
        parts += [f"![Bits of each coefficient, and which tokens are coded](../pictures/bits/{name}.svg)\n"]
    parts += ["| option | default |", "|---|---|"] if options else []
    parts += [f"| `{option.name}` | `{option.default!r}` |" for option in options]
    parts += ["\n## Choices\n", "| axis | keys | values |", "|---|---|---|"]
    for axis in AXES if made.key is not None and made.value is not None else ():
        parts.append(f"| {axis} | `{choice(getattr(made.key, axis))}` | `{choice(getattr(made.value, axis))}` |")
    parts.append(f"| window | `{choice(made.window)}` | the same |\n")
    equations = list(_equations(made))
    parts += ["## In equations\n" if equations else ""]
    for module, (sentence, formula) in equations:
        parts.append(f"`{module.removeprefix('karhunen.')}`: {sentence}\n\n```text\n{formula}\n```\n")
    return "\n".join(parts)


def _equations(value: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Of each part that the recipe is made of, once: its file's first sentence and equation, where it has one."""
    seen: set[str] = set()
    for part in _parts(value):
        module = type(part).__module__
        if module not in seen and (said := _formula(module)):
            yield module, said
        seen.add(module)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    if is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _parts(getattr(value, field.name))


@cache
def _formula(module: str) -> tuple[str, str] | None:
    text = inspect.getdoc(importlib.import_module(module)) or ""
    blocks = text.split("\n\n")
    formula = next((block for block in blocks[1:] if all(line.startswith("  ") for line in block.splitlines())), None)
    if formula is None:
        return None
    return " ".join(blocks[0].split()), inspect.cleandoc(formula.strip("\n"))
