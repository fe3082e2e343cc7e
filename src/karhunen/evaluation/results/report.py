"""Results become one page that needs nothing else, pictures, and a Markdown table.

results ─▶ by model and task ─▶ pictures (inline SVG, and PNG beside the page), sortable tables, provenance
"""

import base64
import html
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from matplotlib import rc_context
from matplotlib.figure import Figure

from karhunen.evaluation.results import plots
from karhunen.evaluation.results.page import CSS, SCRIPT, chart_data
from karhunen.evaluation.results.result import Result
from karhunen.evaluation.results.rows import COLUMNS, Row, bits_per_element, markdown, row_of, rows_of, task_names
from karhunen.folder import check_writable

BEGIN, END = "<!-- karhunen results: begin -->", "<!-- karhunen results: end -->"
TITLE = "<title>karhunen results</title>"
MAX_HEAT_MAPS = 4
DRAWN_BY_SCRIPT = "-rate-distortion"
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "karhunen", "svg.fonttype": "path", "font.size": 9}
NO_DATE = {"Date": None}


@final
@dataclass(frozen=True)
class Picture:
    """A figure with its file name and what it shows in words."""

    name: str
    words: str
    figure: Figure


def write_report(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write `index.html`, `results.md`, `results.json` (the rows) and the PNGs; returns what was written. ValueError if
    files of these names are there that are no report of ours."""
    check_report_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    sections: list[str] = []
    with rc_context(SETTINGS):
        for (model, task), mine in grouped(results).items():
            pictures = list(_pictures(mine, f"{model}-{task}"))
            for picture in pictures:
                path = folder / f"{picture.name}.png"
                picture.figure.savefig(path, dpi=150, metadata={"Software": None})
                written.append(path)
            sections.append(_section(model, task, mine, pictures))
    rows = rows_of(results)
    written += [
        _write(folder / "index.html", page(results, sections)),
        _write(folder / "results.md", markdown(rows) + "\n"),
        _write(folder / "results.json", json.dumps([row.to_dict() for row in rows], indent=1) + "\n"),
    ]
    return written


def check_report_target(folder: Path) -> None:
    """ValueError if a report cannot be written there, or only over files that another program wrote."""
    page = folder / "index.html"
    if page.is_file() and TITLE in page.read_text(encoding="utf-8", errors="replace")[:1000]:
        return
    if taken := [name for name in ("index.html", "results.md", "results.json") if (folder / name).exists()]:
        raise ValueError(f"{folder} holds {', '.join(taken)}, and no report of karhunen; choose another --output")
    check_writable(folder)


def update_between_markers(path: Path, results: Sequence[Result]) -> None:
    """Put the Markdown table between the two markers of a file; ValueError if it lacks them."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the markers {BEGIN} and {END} between which the table goes")
    table = markdown(rows_of(results))
    _write(path, f"{head}{BEGIN}\n{table}\n{END}{tail}")


def grouped(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """By model, task and inputs, in alphabetical order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result, name in zip(results, task_names(results), strict=True):
        found.setdefault((result["configuration"]["model"], name), []).append(result)
    return dict(sorted(found.items()))


def page(results: Sequence[Result], sections: Sequence[str]) -> str:
    """The whole document."""
    commits = sorted({result["made"]["commit"] or "unknown" for result in results})
    models = sorted({result["configuration"]["model"] for result in results})
    mixed = f"<p class=note>These results come from {len(commits)} commits.</p>" if len(commits) > 1 else ""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"{TITLE}<style>{CSS}</style></head><body>"
        f"<h1>karhunen results</h1><p>{len(results)} results on {html.escape(', '.join(models))}. Rates are measured "
        "from bytes held, all metadata included. A column's head sorts the table; a point shows its row.</p>"
        f"{mixed}{''.join(sections)}{_provenance(results)}<script>{SCRIPT}</script></body></html>\n"
    )


def _pictures(results: Sequence[Result], stem: str) -> Iterator[Picture]:
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in stem)
    if any("kl" in result.get("metrics", {}) for result in results):
        words = "Error against rate. Bars are 95 % bootstrap intervals; lower left is better."
        yield Picture(f"{stem}-rate-distortion", words, plots.rate_distortion(results))
    yield Picture(f"{stem}-bytes", "What the cache holds, by kind.", plots.byte_account(results))
    if (figure := plots.error_per_layer(results)) is not None:
        yield Picture(f"{stem}-layers", "Error that coding one layer alone makes, near two bits.", figure)
    for i, result in enumerate(sorted(_varied(results), key=lambda r: abs(bits_per_element(r) - 2))[:MAX_HEAT_MAPS]):
        if (figure := plots.bits_per_head(result)) is not None:
            text = result["configuration"]["text"]
            yield Picture(f"{stem}-bits-{i}", f"Where {text} spends its bits.", figure)
    for i, result in enumerate(_near_two_bits(results, ("karhunen", "spectra", "nova_kv", "int4"))):
        if (figure := plots.of_coordinates(result)) is not None:
            text = result["configuration"]["text"]
            yield Picture(f"{stem}-coordinates-{i}", f"What the transform of {text} does, mean over layers.", figure)
    for i, result in enumerate([r for r in results if r.get("needles")][: 4 * MAX_HEAT_MAPS]):
        if (figure := plots.needles(result)) is not None:
            yield Picture(f"{stem}-needles-{i}", f"Facts found again from {result['configuration']['text']}.", figure)
    if (figure := plots.speed(results)) is not None:
        yield Picture(f"{stem}-speed", "Seconds per token, decode by the plain path.", figure)


def _varied(results: Sequence[Result]) -> list[Result]:
    """Those whose bits differ between layers or heads; a picture of one number is none. One per method."""
    found: dict[str, Result] = {}
    for result in sorted(results, key=lambda r: abs(bits_per_element(r) - 2)):
        bits = {round(b, 3) for row in result.get("bits", []) for b in row["heads"]}
        if len(bits) > 2:
            found.setdefault(result["configuration"]["recipe"], result)
    return list(found.values())


def _near_two_bits(results: Sequence[Result], names: Sequence[str]) -> list[Result]:
    """One result of each named method, the nearest to two bits; of whichever methods there are if none is named so."""
    found: dict[str, Result] = {}
    for result in sorted(results, key=lambda r: abs(bits_per_element(r) - 2)):
        found.setdefault(result["configuration"]["recipe"], result)
    named = [found[name] for name in names if name in found]
    return named or list(found.values())[:MAX_HEAT_MAPS]


def _section(model: str, task: str, results: Sequence[Result], pictures: Sequence[Picture]) -> str:
    """Error against rate is drawn by the script; its picture stands in for browsers that run none."""
    rows = sorted((row_of(result) for result in results), key=lambda row: row.bits_per_element)
    drawn = [picture for picture in pictures if picture.name.endswith(DRAWN_BY_SCRIPT)]
    others = "".join(_figure(picture) for picture in pictures if picture not in drawn)
    chart = "".join(
        f"<div class=chart><script type='application/json'>{chart_data(rows)}</script>"
        f"<noscript>{_figure(picture)}</noscript></div><p class=note>{html.escape(picture.words)}</p>"
        for picture in drawn
    )
    return (
        f"<section><h2>{html.escape(model)}: {html.escape(task)}</h2>"
        f"<p class=note>{html.escape(plots.caption(results))}</p>{chart}{_table(rows)}{others}</section>"
    )


def _figure(picture: Picture) -> str:
    return (
        f"<figure><img alt='{html.escape(picture.words, quote=True)}' "
        f"src='data:image/svg+xml;base64,{_svg(picture.figure)}'>"
        f"<figcaption>{html.escape(picture.words)}</figcaption></figure>"
    )


def _table(rows: Sequence[Row]) -> str:
    shown = [name for i, name in enumerate(COLUMNS) if any(row.cells()[i] for row in rows)][2:]
    head = "".join(f"<th><button>{html.escape(name)}</button></th>" for name in shown)
    body = "".join(
        f"<tr data-row='{html.escape(row.fingerprint, quote=True)}'>" + "".join(
            f"<td>{html.escape(cell)}</td>" for name, cell in zip(COLUMNS, row.cells(), strict=True) if name in shown
        ) + "</tr>" for row in rows
    )  # fmt: skip
    return f"<div class=wide><table class=sortable><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _provenance(results: Sequence[Result]) -> str:
    made = {}
    for result in results:
        about = result["made"]
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        key = (about["commit"] or "unknown", about["machine"], about["n_threads"], versions)
        made.setdefault(key, []).append(about["date"])
    rows = "".join(
        f"<tr><td>{html.escape(commit)}</td><td>{len(dates)}</td>"
        f"<td>{html.escape(min(dates)[:10])} to {html.escape(max(dates)[:10])}</td>"
        f"<td>{html.escape(machine)}, {html.escape(str(threads))} threads</td><td>{html.escape(versions)}</td></tr>"
        for (commit, machine, threads, versions), dates in sorted(made.items())
    )
    head = "<th>commit</th><th>results</th><th>days</th><th>machine</th><th>versions</th>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<section><h2>Provenance</h2><div class=wide>{table}</div></section>"


def _svg(figure: Figure) -> str:
    held = io.BytesIO()
    figure.savefig(held, format="svg", metadata=NO_DATE)
    return base64.b64encode(held.getvalue()).decode()


def _write(path: Path, text: str) -> Path:
    work = path.with_name(f".{path.name}.part")
    work.write_text(text, encoding="utf-8")
    return work.replace(path)
