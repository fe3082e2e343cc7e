"""`karhunen recipes`: the table of methods, made from the recipe files themselves."""

from collections.abc import Mapping
from dataclasses import asdict

from karhunen.cli.screen import Screen, grid, rounded


def run(as_json: bool) -> None:
    """List every recipe."""
    from karhunen.evaluation.composition import recipe_rows

    screen = Screen(as_json)
    with screen.open():
        rows = recipe_rows()
        table = grid("recipe", "source", "keys", "values", "options", "calibrated")
        for row in rows:
            options = ", ".join(f"{key}={value}" for key, value in row.options.items())
            called = "yes" if row.needs_calibration else "no"
            table.add_row(row.name, row.source, _axes(row.key), _axes(row.value), options or "none", called)
        screen.table(table)
        screen.say("Choices that are the plainest of their axis are left out; `--json` has them all.")
        screen.document(rounded({"recipes": [asdict(row) for row in rows]}))


def _axes(axes: Mapping[str, str]) -> str:
    plain = ("RopeFrame", "Plain", "Identity", "FixedWidth")
    return " · ".join(choice for choice in axes.values() if choice not in plain) or "exact"
