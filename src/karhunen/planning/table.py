"""The built-in table of models: numbers of their published configurations, each with its source (models.json)."""

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from karhunen.planning.reading import read_shape
from karhunen.planning.shape import ModelShape


def names() -> list[str]:
    """Every model of the table, in its order."""
    return [entry["name"] for entry in entries()]


def find(name: str) -> ModelShape | None:
    """The model of that name or hub id, whatever its case and punctuation; None if the table has none."""
    found = entry_of(name)
    if found is None:
        return None
    return read_shape({**found["config"], "weights": found["weights"]}, found["name"], found["source"])


def entry_of(name: str) -> dict[str, Any] | None:
    """The entry of that name or hub id."""
    return next((e for e in entries() if _plain(name) in (_plain(e["name"]), _plain(e["id"]))), None)


@cache
def entries() -> tuple[dict[str, Any], ...]:
    """`name`, `id`, `source`, `config` and `weights` of each model, as the file has them."""
    text = files("karhunen.planning").joinpath("models.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())
