"""The page's style, its script, and the numbers that the script draws; all stand inside the page, which asks nothing of
a network.

rows ─▶ JSON ─▶ page.js: a picture with a name at each line, ten methods at first, a choice of more, points that show
their row
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from karhunen.evaluation.results import plots
from karhunen.evaluation.results.rows import Row


def _file(name: str) -> str:
    return files("karhunen.evaluation.results").joinpath(name).read_text(encoding="utf-8")


CSS = _file("page.css")
SCRIPT = _file("page.js")


def chart_data(rows: Sequence[Row]) -> str:
    """JSON for one section's picture, safe inside a script element: names come from files."""
    recipes = dict.fromkeys(row.recipe for row in rows)
    body: dict[str, Any] = {
        "ours": plots.OURS,
        "looks": {recipe: _look(recipe) for recipe in recipes},
        "rows": [_point(row) for row in rows],
    }
    return json.dumps(body).replace("<", "\\u003c")


def _look(recipe: str) -> dict[str, Any]:
    look = plots.style(recipe)
    return {"color": look["color"], "marker": look["marker"], "dashed": look["linestyle"] != "-"}


def _point(row: Row) -> dict[str, Any]:
    """What is drawn of a row, and what is said when it is pointed at."""
    changed = None if row.top1 is None else 1 - row.top1
    cells = dict(zip(("bits", "times", "kl", "kl_range", "top1", "top1_range"), row.cells()[3:9], strict=True))
    says = [row.text, f"{cells['bits']} bits, {cells['times']} times smaller"]
    if row.kl is not None:
        says.append(f"KL {cells['kl']} nats" + (f" ({cells['kl_range']})" if cells["kl_range"] else ""))
    if row.top1 is not None:
        says.append(f"top-1 {cells['top1']}" + (f" ({cells['top1_range']})" if cells["top1_range"] else ""))
    says.append(f"commit {row.commit}")
    bars: dict[str, list[float]] = {}
    if row.kl_low is not None and row.kl_high is not None:
        bars["kl"] = [row.kl_low, row.kl_high]
    if row.top1_low is not None and row.top1_high is not None:
        bars["changed"] = [1 - row.top1_high, 1 - row.top1_low]
    return {"id": row.fingerprint, "recipe": row.recipe, "bits": row.bits_per_element, "kl": row.kl, "changed": changed,
            "bars": bars, "says": says}  # fmt: skip
