"""`karhunen recipes`: the table of methods, made from the recipe files themselves."""

from collections.abc import Mapping
from dataclasses import asdict

from karhunen.cli.screen import Screen, grid, rounded


def run(as_json: bool) -> None:
    """List every recipe."""
    from karhunen.evaluation.results.composition import measured_bits, recipe_rows

    screen = Screen(as_json)
    with screen.open():
        rows = recipe_rows()
        table = grid("recipe", "source", "keys", "values", "options", "calibrated", "bits all / coded, synthetic")
        table.columns[0].no_wrap = True  # a name is copied from here
        for row in rows:
            options = ", ".join(f"{key}={value}" for key, value in row.options.items())
            called = "yes" if row.needs_calibration else "no"
            bits = _bits(row.measured_bits)
            table.add_row(row.name, row.source, _axes(row.key), _axes(row.value), options or "none", called, bits)
        screen.table(table)
        screen.say("Choices that are the plainest of their axis are left out; `--json` has them all.")
        found = measured_bits()
        commit = found["provenance"]["commit"]
        screen.say(
            f"Bits per element, of all {found['n_tokens']:,} tokens and of the coded ones: counted on synthetic "
            f"vectors, drawn at random, at commit {commit}. `karhunen evaluate` measures a model's own."
        )
        measured = {key: found[key] for key in ("what", "n_tokens", "provenance")}
        screen.document(rounded({"recipes": [asdict(row) for row in rows], "measured": measured}))


def _bits(measured: Mapping[str, float]) -> str:
    if not measured:
        return "not measured"
    return f"{measured['all']:.2f} / " + (f"{measured['coded']:.2f}" if measured["coded"] else "none")


def _axes(axes: Mapping[str, str]) -> str:
    plain = ("RopeFrame", "Plain", "Identity", "FixedWidth")
    return " · ".join(choice for choice in axes.values() if choice not in plain) or "exact"
