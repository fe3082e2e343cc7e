"""The tables of docs/tasks.md and the picture docs/tasks.png, from what tasks.py and tails.py measured.

    python benchmarks/task_tables.py

A table stands between two marks of the page; what is between them is replaced, the words around it stay. A task of
which the dense model does less than four fifths says nothing of a codec and is left out, but for code, where what
counts is whether the dense model's line comes.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from karhunen.evaluation.scores.shares import mcnemar, wilson
from karhunen.evaluation.tasks.questions import CONCLUSIVE

Cell = dict[str, Any]

SAME = ("code",)  # kinds of which the share of unchanged answers is told, not that of right ones
LEVEL = 0.05  # of a test
MAPPED = (("karhunen", 8), ("karhunen", 16), ("spectra", 8), ("nova_kv", 8), ("kivi", 8), ("int4", 4))


def main() -> None:
    """Write tables and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=Path, default=Path("results/measured/tasks-smollm2.json"))
    parser.add_argument("--tails", type=Path, default=Path("results/measured/tails-smollm2.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/tasks.md"))
    parser.add_argument("--plot", type=Path, default=Path("docs/tasks.png"))
    given = parser.parse_args()
    page = given.page.read_text(encoding="utf-8")
    if given.tasks.is_file():
        found = json.loads(given.tasks.read_text(encoding="utf-8"))
        for name, table in (("lost", lost), ("answers", answers), ("same", unchanged), ("dense", dense_table)):
            page = between(page, name, table(found))
        figure_of(found).savefig(given.plot, dpi=130)
        page = between(page, "picture", f"![right answers by task and recipe, passkeys by depth]({given.plot.name})")
    if given.tails.is_file():
        rows = json.loads(given.tails.read_text(encoding="utf-8"))["rows"]
        for name, table in (("tails", tails), ("equal tails", equal_tails), ("worst", worst)):
            page = between(page, name, table(rows))
    given.page.write_text(page, encoding="utf-8")


def between(page: str, name: str, table: str) -> str:
    """The page with this table between its marks; ValueError if they are not there."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page has no place for the table {name!r}: {begin} and {end} are wanted")
    return f"{page.partition(begin)[0]}{begin}\n{table}\n{end}{page.partition(end)[2]}"


def columns(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Kind to its tasks that the dense model does; lengths of one kind are one column."""
    kinds: dict[str, list[str]] = {}
    for task, dense in found["dense"].items():
        if dense["score"] >= CONCLUSIVE or task.split()[0] in SAME:
            kinds.setdefault(task.split()[0], []).append(task)
    return kinds


def methods(found: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Recipes and rates, larger caches first."""
    return sorted({(cell["recipe"], cell["rate"]) for cell in found["cells"]}, key=lambda one: (one[1], one[0]))


def pooled(found: Mapping[str, Any], tasks: Sequence[str], recipe: str, rate: int) -> tuple[list[bool], list[bool]]:
    """Right answers of a cell and, of the same questions, of the dense model; of several tasks one after the other."""
    mine: list[bool] = []
    dense: list[bool] = []
    for cell in found["cells"]:
        if cell["task"] in tasks and (cell["recipe"], cell["rate"]) == (recipe, rate):
            mine += [digit == "1" for digit in cell["right"]]
            dense += [digit == "1" for digit in found["dense"][cell["task"]]["right"][: len(cell["right"])]]
    return mine, dense


def answers(found: Mapping[str, Any]) -> str:
    """Per cent of right answers with the interval; ↓ where the dense model is better by McNemar's test."""
    kinds = {kind: tasks for kind, tasks in columns(found).items() if kind not in SAME}
    everything = [task for tasks in kinds.values() for task in tasks]

    def row(recipe: str, rate: int) -> list[str]:
        cells = [_cell(*pooled(found, tasks, recipe, rate)) for tasks in (*kinds.values(), everything)]
        return [f"`{recipe}`", f"{rate}", *cells]

    dense = [
        [d == "1" for task in tasks for d in found["dense"][task]["right"]] for tasks in (*kinds.values(), everything)
    ]
    rows = [["dense", "1", *(_cell(right, right) for right in dense)], *(row(*one) for one in methods(found))]
    return markdown(["recipe", "times smaller", *kinds, "all"], rows)


def _cell(mine: Sequence[bool], dense: Sequence[bool]) -> str:
    if not mine:
        return "–"
    low, high = wilson(sum(mine), len(mine))
    worse = mcnemar(mine, dense) < LEVEL and sum(mine) < sum(dense)
    return f"{100 * sum(mine) / len(mine):.0f} ({100 * low:.0f}–{100 * high:.0f}){' ↓' if worse else ''}"


def unchanged(found: Mapping[str, Any]) -> str:
    """Of all kinds, the share of answers that are the dense model's, letter for letter; of code also how alike."""
    kinds = columns(found)

    def share(tasks: Sequence[str], recipe: str, rate: int, value: str = "same") -> str:
        cells = [c for c in found["cells"] if c["task"] in tasks and (c["recipe"], c["rate"]) == (recipe, rate)]
        n = sum(cell["n_questions"] for cell in cells)
        mean = sum(cell[value] * cell["n_questions"] for cell in cells) / n if n else 0.0
        if value != "same" or not n:
            return f"{mean:.3f}" if n else "–"
        low, high = wilson(round(mean * n), n)
        return f"{100 * mean:.0f} ({100 * low:.0f}–{100 * high:.0f})"

    code = kinds.get("code", [])
    rows = [
        [f"`{recipe}`", f"{rate}", *(share(tasks, recipe, rate) for tasks in kinds.values()),
         share(code, recipe, rate, "similarity")]
        for recipe, rate in methods(found)
    ]  # fmt: skip
    return markdown(["recipe", "times smaller", *kinds, "code: similarity"], rows)


def dense_table(found: Mapping[str, Any]) -> str:
    """What the dense model does of each task, and how many questions there are."""
    rows = [
        [task, f"{len(one['right'])}", f"{100 * one['score']:.0f}",
         "yes" if one["score"] >= CONCLUSIVE else "its own lines" if task.split()[0] in SAME else "no",
         f"`{one['commit']}`"]
        for task, one in found["dense"].items()
    ]  # fmt: skip
    return markdown(["task", "questions", "dense, % right", "in the tables", "commit"], rows)


def lost(found: Mapping[str, Any]) -> str:
    """Each kind and rate at which `karhunen` is below the dense model, or below a recipe of no more bytes."""
    lines: list[str] = []
    for rate in sorted({cell["rate"] for cell in found["cells"] if cell["recipe"] == "karhunen"}):
        for kind, tasks in columns(found).items():
            if kind in SAME:
                continue
            mine, dense = pooled(found, tasks, "karhunen", rate)
            rivals = [("the dense model", dense)]
            for other, r in methods(found):
                if other != "karhunen" and r >= rate:
                    theirs = pooled(found, tasks, other, r)[0]
                    rivals += [(f"`{other}` at {r}", theirs)] if len(theirs) == len(mine) else []
            for name, theirs in rivals:
                if mine and sum(theirs) > sum(mine):
                    p = mcnemar(mine, theirs)
                    said = "beyond chance" if p < LEVEL else "within chance"
                    lines.append(
                        f"- **{kind} at {rate} times**: {sum(mine)} of {len(mine)} right, {name} {sum(theirs)} "
                        f"({said}, p = {p:.2g})."
                    )
    return "\n".join(lines) or "Nowhere so far: no cell of `karhunen` is below the dense model's or a smaller cache's."


def tails(rows: Sequence[Cell]) -> str:
    """One row each, at the usual window."""
    head = ["prompt", "recipe", "bits", "KL, mean", "95 %", "KL, 99 %", "KL, 99.9 %", "worst", "top-1",
            "perplexity (dense)", "greedy text leaves at"]  # fmt: skip

    def row(one: Cell) -> list[str]:
        leaves = ", ".join("–" if at is None else str(at) for at in one["leaves_at"])
        return [
            f"{one['tokens']:,}", f"`{one['recipe']}`", f"{one['coded_bits_per_element']:.2f}", _nats(one["kl"]),
            f"{_nats(one['kl_low'])}–{_nats(one['kl_high'])}", *(_nats(one[k]) for k in ("kl_p99", "kl_p999", "worst")),
            f"{100 * one['top1']:.1f}", f"{one['perplexity']:.3f} ({one['perplexity_dense']:.3f})", leaves,
        ]  # fmt: skip

    kept = sorted((one for one in rows if one["window"] != "none"), key=lambda one: (one["tokens"], one["kl"]))
    return markdown(head, [row(one) for one in kept])


def equal_tails(rows: Sequence[Cell]) -> str:
    """KL with and without exact tokens, of the same recipe."""
    both = [
        (one, other)
        for one in rows
        for other in rows
        if (one["tokens"], one["recipe"]) == (other["tokens"], other["recipe"])
        and (one["window"], other["window"]) == ("4 + 128", "none")
    ]
    lines = [
        [f"`{one['recipe']}`", f"{one['coded_bits_per_element']:.2f}", f"{16 / one['coded_bits_per_element']:.1f}",
         _nats(one["kl"]), _nats(other["kl"]), f"{100 * one['top1']:.1f}", f"{100 * other['top1']:.1f}",
         f"`{one['commit']}`"]
        for one, other in sorted(both, key=lambda pair: pair[1]["kl"])
    ]  # fmt: skip
    head = ["recipe", "bits", "times smaller", "KL, 4 + 128 exact", "KL, none exact", "top-1, 4 + 128", "top-1, none",
            "commit"]  # fmt: skip
    return markdown(head, lines)


def worst(rows: Sequence[Cell]) -> str:
    """Where `karhunen` is farthest off, in words."""
    lines = [
        [f"{one['tokens']:,}", f"`{one['recipe']}`", _nats(one["worst"]), one["worst_at"]["document"],
         *(_code(one["worst_at"][key]) for key in ("before", "dense", "text"))]
        for one in rows
        if one["recipe"].startswith("karhunen") and one["window"] != "none"
    ]  # fmt: skip
    return markdown(["prompt", "recipe", "KL", "document", "text before", "dense expects", "comes"], lines)


def _code(text: str) -> str:
    plain = text.replace("\n", "⏎").replace("`", "'").replace("|", "¦")
    return f"`{plain}`"


def _nats(x: float) -> str:
    return f"{x:.4f}" if x < 0.1 else f"{x:.3f}" if x < 1 else f"{x:.2f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def figure_of(found: Mapping[str, Any]) -> Figure:
    """A panel for each kind, a row for each recipe; below, passkeys by depth and length."""
    kinds, rows = columns(found), methods(found)[::-1]
    mapped = [one for one in MAPPED if any((c["recipe"], c["rate"]) == one and "depths" in c for c in found["cells"])]
    figure = Figure(figsize=(2.1 * max(len(kinds), 1) + 1.5, 2.2 + 0.24 * len(rows) + 2.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.2 + 0.24 * len(rows), 2.4])
    panels = upper.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, (kind, tasks) in zip(panels, kinds.items(), strict=True):
        _panel(axes, found, kind, tasks, rows)
    panels[0].set_yticks(range(len(rows)), [f"{recipe} {rate}×" for recipe, rate in rows], fontsize=8)
    if mapped:
        maps = lower.subplots(1, len(mapped), sharey=True, squeeze=False)[0]
        for axes, one in zip(maps, mapped, strict=True):
            _heat(axes, found, *one)
        maps[0].set_ylabel("passkey's depth", fontsize=8)
    return figure


def _panel(
    axes: Any, found: Mapping[str, Any], kind: str, tasks: Sequence[str], rows: Sequence[tuple[str, int]]
) -> None:
    for y, (recipe, rate) in enumerate(rows):
        cells = [c for c in found["cells"] if c["task"] in tasks and (c["recipe"], c["rate"]) == (recipe, rate)]
        n = sum(cell["n_questions"] for cell in cells)
        if not n:
            continue
        value: Callable[[Cell], float] = lambda cell: cell["same" if kind in SAME else "score"] * cell["n_questions"]  # noqa: E731
        right = round(sum(map(value, cells)))
        low, high = wilson(right, n)
        colour = "#c0392b" if recipe == "karhunen" else "#34495e"
        error = [[max(0, right / n - low)], [max(0, high - right / n)]]
        axes.errorbar(right / n, y, xerr=error, fmt="o", ms=4, lw=1.2, color=colour)
    dense = [digit == "1" for task in tasks for digit in found["dense"][task]["right"]]
    if kind not in SAME:
        axes.axvline(sum(dense) / len(dense), color="#7f8c8d", ls="--", lw=1)
    axes.set_title(f"{kind}{', as dense' if kind in SAME else ''}", fontsize=9)
    axes.set_xlim(-0.03, 1.03)
    axes.tick_params(labelsize=7)
    axes.grid(axis="x", alpha=0.3)


def _heat(axes: Any, found: Mapping[str, Any], recipe: str, rate: int) -> None:
    cells = [c for c in found["cells"] if "depths" in c and (c["recipe"], c["rate"]) == (recipe, rate)]
    cells.sort(key=lambda cell: int(cell["task"].split()[1]))
    depths = sorted({depth for cell in cells for depth in cell["depths"]})
    grid = [
        [
            _mean([digit == "1" for digit, at in zip(cell["right"], cell["depths"], strict=True) if at == depth])
            for cell in cells
        ]
        for depth in depths
    ]
    axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(cells)), [cell["task"].split()[1] for cell in cells], fontsize=7)
    axes.set_yticks(range(len(depths)), [f"{depth:.2f}" for depth in depths], fontsize=7)
    axes.set_title(f"{recipe} {rate}×", fontsize=9)


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")


if __name__ == "__main__":
    main()
