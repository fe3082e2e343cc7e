"""Pictures of results. Every method has one colour and one marker, the same in all of them.

Colours: Okabe & Ito (2008), told apart by the colour-blind; with the markers, also in print without colour.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from karhunen import recipes
from karhunen.evaluation.results.result import Result
from karhunen.evaluation.results.rows import Row, bits_per_element, is_smaller, row_of

COLOURS = ("#0072B2", "#B2182B", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#8C6D1F", "#5E3C99")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "p", "d", "H")
OURS = "karhunen"
BASELINES = {"full": "o", "fp8": "s", "fp8_static": "D", "int8": "X", "int4": "P", "int2": "v"}
FIRST = ("spectra", "nova_kv", "turboquant", "kivi", "quarot", "kvquant", "kvtc", "palu")  # each a colour of its own
MAX_BARS = 80
MAX_LINES = 12


def style(recipe: str) -> dict[str, Any]:
    """Colour, marker and line of a method: ours orange stars, plain baselines grey, of the papers the first eight
    solid lines of their own colour, the others dashed lines told apart by colour and marker together."""
    if recipe == OURS:
        return {"color": "#D55E00", "marker": "*", "zorder": 5, "linestyle": "-"}
    if recipe in BASELINES:
        return {"color": "#777777", "marker": BASELINES[recipe], "linestyle": ":"}
    if recipe in FIRST:
        i = FIRST.index(recipe)
        return {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": "-"}
    others = [name for name in recipes.names() if name not in (OURS, *BASELINES, *FIRST)]
    i = others.index(recipe) if recipe in others else len(others) + sum(recipe.encode()) % 16
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + 5) % len(MARKERS)], "linestyle": "--"}


def rate_distortion(results: Sequence[Result]) -> Figure:
    """KL and the share of changed predictions against bits per element, both on log scales."""
    rows = [row_of(result) for result in results if is_smaller(result) and "kl" in result.get("metrics", {})]
    n_methods = len({row.recipe for row in rows})
    figure = Figure(figsize=(11, max(4.6, 0.6 + 0.17 * n_methods)), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, rows, lambda row: row.kl, lambda row: (row.kl_low, row.kl_high))
    _curves(right, rows, lambda row: _changed(row.top1), lambda row: (_changed(row.top1_high), _changed(row.top1_low)))
    left.set_ylabel("logit KL to the dense model, nats")
    right.set_ylabel("share of predictions changed (1 − top-1 agreement)")
    for axes in (left, right):
        axes.set_xlabel("bits per element of coded tokens, all metadata included")
        _log(axes)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return _described(figure, results)


def byte_account(results: Sequence[Result]) -> Figure:
    """What the cache holds, by kind, as a share of the uncompressed cache."""
    all_of_them = list({result["configuration"]["text"]: result for result in results}.values())
    shown = _spread(all_of_them, MAX_BARS)
    figure = Figure(figsize=(11, 1.2 + 0.2 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.margins(y=0.01)
    kinds = (("codes", "#0072B2"), ("scales_and_gains", "#E69F00"), ("exact_tokens", "#999999"))
    names = [result["configuration"]["text"] for result in shown]
    places = range(len(shown))
    left = [0.0] * len(shown)
    for kind, colour in kinds:
        share = [r["cache"]["bytes"][kind] / max(1, r["cache"]["bytes"]["dense"]) for r in shown]
        axes.barh(places, share, left=left, color=colour, label=kind.replace("_", " "), height=0.7)
        left = [a + b for a, b in zip(left, share, strict=True)]
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"share of the uncompressed cache ({shown[0]['configuration']['dtype']}), first document")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return _described(figure, shown, _share_shown(len(shown), len(all_of_them), "evenly over the rates"))


def error_per_layer(results: Sequence[Result]) -> Figure | None:
    """Attention KL and output error of each layer, one line per method at about the same rate; of many methods those
    that err least."""
    methods = _one_per_method([r for r in results if r.get("layers")])
    if not methods:
        return None
    shown = sorted(sorted(methods, key=_output_error)[:MAX_LINES], key=lambda r: r["configuration"]["text"])
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, key in ((left, "attention_kl"), (right, "output_error")):
        for result in shown:
            layers = [row for row in result["layers"] if (row[key] or 0) > 0]
            look = style(result["configuration"]["recipe"])
            label = f"{result['configuration']['text']} ({bits_per_element(result):.2f} bits)"
            axes.plot([x["layer"] for x in layers], [x[key] for x in layers], label=label, markersize=4, lw=1, **look)
        axes.set_yscale("log")
        axes.set_xlabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, which="both")
    left.set_ylabel("attention KL, nats")
    right.set_ylabel("attention output error, share of its energy")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return _described(figure, shown, _share_shown(len(shown), len(methods), "least output error"))


def bits_per_head(result: Result) -> Figure | None:
    """Mean bits per coefficient of each layer and head group; keys left, values right."""
    rows = result.get("bits", [])
    if not rows:
        return None
    figure = Figure(figsize=(11, 1.6 + 0.12 * len(rows)), layout="constrained")
    most = max(bits for row in rows for bits in row["heads"])
    image: Any = None
    for axes, slot in zip(figure.subplots(1, 2), ("key", "value"), strict=True):
        mine = [row for row in rows if row["slot"] == slot]
        grid = [row["heads"] for row in mine]
        image = axes.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=most, interpolation="nearest")
        axes.set_yticks(
            range(0, len(mine), max(1, len(mine) // 10)), [r["layer"] for r in mine][:: max(1, len(mine) // 10)]
        )
        axes.set_xticks(range(len(grid[0])))
        axes.set_xlabel("head" if len(grid[0]) > 1 else "all heads joined")
        axes.set_ylabel("layer")
        axes.set_title(f"{slot}s", loc="left")
    figure.colorbar(image, ax=figure.axes, label="bits per coefficient, codes only")
    return _described(figure, [result], result["configuration"]["text"])


def of_coordinates(result: Result) -> Figure | None:
    """Energy and bits by coordinate, and how correlated coordinates are, before and after the transform."""
    sides = result.get("coordinates", [])
    if not sides:
        return None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    energy, bits, correlation = figure.subplots(1, 3, width_ratios=(1, 1, 0.7))
    for side, colour in zip(sides, COLOURS, strict=False):
        at = [i / (len(side["bits"]) - 1) for i in range(len(side["bits"]))]
        energy.plot(at, side["energy_before"], ls="--", lw=1.2, color=colour, label=f"{side['slot']}s as cached")
        energy.plot(at, side["energy_after"], lw=1.6, color=colour, label=f"{side['slot']}s transformed")
        bits.step(at, side["bits"], where="mid", lw=1.6, color=colour, label=f"{side['slot']}s")
    places, shown = range(2 * len(sides)), [(s, when) for s in sides for when in ("before", "after")]
    heights = [side[f"correlation_{when}"] for side, when in shown]
    correlation.bar(places, heights, color=[COLOURS[i // 2] for i in places], alpha=0.85, width=0.7)
    words = {"before": "cached", "after": "coded"}
    correlation.set_xticks(places, [f"{side['slot']}s\n{words[when]}" for side, when in shown], fontsize=7)
    correlation.set_ylabel("mean |correlation| of two coordinates")
    energy.set_ylabel("share of the energy")
    bits.set_ylabel("bits of a coordinate")
    for axes in (energy, bits):
        axes.set_xlabel("share of the coordinates, strongest first")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
    for axes in (energy, bits, correlation):
        axes.spines[["top", "right"]].set_visible(False)
    return _described(figure, [result], result["configuration"]["text"])


def needles(result: Result) -> Figure | None:
    """Where a fact was found again, by length and depth: dense left, coded right."""
    cells = result.get("needles", [])
    if not cells:
        return None
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    image: Any = None
    for axes, key in zip(figure.subplots(1, 2), ("dense", "coded"), strict=True):
        share = {(cell["depth"], cell["length"]): cell[key] for cell in cells}
        grid = [[share.get((depth, length), float("nan")) for length in lengths] for depth in depths]
        image = axes.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black")
        axes.set_xlabel("tokens")
        axes.set_ylabel("depth of the fact")
        axes.set_title("dense" if key == "dense" else result["configuration"]["text"], loc="left")
    figure.colorbar(image, ax=figure.axes, label="share found")
    return _described(figure, [result])


def speed(results: Sequence[Result]) -> Figure | None:
    """Seconds to decode the context once against its length; only where several lengths were measured."""
    timed = [r for r in results if "decode_prompt" in r.get("seconds", {})]
    lengths = {r["configuration"]["task"]["prefill_tokens"] for r in timed}
    if len(lengths) < 2:
        return None
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for recipe in sorted({r["configuration"]["recipe"] for r in timed}):
        mine = sorted(
            (r["configuration"]["task"]["prefill_tokens"], r["seconds"]["decode_prompt"])
            for r in timed if r["configuration"]["recipe"] == recipe
        )  # fmt: skip
        axes.plot(*zip(*mine, strict=True), label=recipe, lw=1, **style(recipe))
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("seconds to decode the context once")
    _log(axes)
    axes.legend(frameon=False, fontsize=8)
    return _described(figure, timed)


def caption(results: Sequence[Result]) -> str:
    """n, model, text, commit: what a picture has to say of itself."""
    n = max((r.get("metrics", {}).get("n_tokens", 0) for r in results), default=0)
    models = sorted({f"{r['configuration']['model']} ({r['configuration']['dtype']})" for r in results})
    texts = sorted({_text_of(result) for result in results})
    commits = sorted({r["made"]["commit"] or "no commit" for r in results})
    count = f"n = {n:,} tokens" if n else f"n = {max(len(r.get('answers', [])) for r in results)} questions"
    return f"{count} · {', '.join(models)} · {_first(texts, 2, ' | ')} · commit {_first(commits, 3, ', ')}"


def _text_of(result: Result) -> str:
    documents = [document["name"] for document in result.get("documents", [])]
    return _first(documents, 4, ", ") if documents else result["configuration"]["task"]["name"]


def _first(names: list[str], n: int, separator: str) -> str:
    return separator.join(names[:n]) + (f"{separator}…" if len(names) > n else "")


def _changed(top1: float | None) -> float | None:
    return None if top1 is None else 1 - top1


Ends = Callable[[Row], tuple[float | None, float | None]]


def _curves(axes: Any, rows: list[Row], value: Callable[[Row], float | None], ends: Ends) -> None:
    """One line per method through its rates; where a setting was measured on several seeds, through their means. What
    has no error has no place on a logarithmic axis, and is named below."""
    exact = sorted({row.text for row in rows if (y := value(row)) is not None and y <= 0})
    if exact:
        words = f"no error: {_first(exact, 3, ', ')}"
        axes.text(0.01, 0.01, words, transform=axes.transAxes, fontsize=7, color="#555555")
    for recipe in sorted({row.recipe for row in rows}):
        settings: dict[str, list[tuple[Row, float]]] = {}
        for row in rows:
            if row.recipe == recipe and (y := value(row)) is not None and y > 0:
                settings.setdefault(row.text, []).append((row, y))
        points = sorted((fmean(r.bits_per_element for r, _ in s), fmean(y for _, y in s), s) for s in settings.values())
        if not points:
            continue
        look = style(recipe)
        bars = [_bar(y, s, ends) for _, y, s in points]
        x, y = [point[0] for point in points], [point[1] for point in points]
        spread = list(zip(*bars, strict=True))
        axes.errorbar(x, y, yerr=spread, label=recipe, lw=1.1, markersize=5, capsize=2, elinewidth=0.7, **look)


def _bar(y: float, of: list[tuple[Row, float]], ends: Ends) -> tuple[float, float]:
    """Below and above: the interval of a single result, the range of several."""
    low, high = ends(of[0][0]) if len(of) == 1 else (min(value for _, value in of), max(value for _, value in of))
    return max(0.0, y - (y if low is None else low)), max(0.0, (y if high is None else high) - y)


def _log(axes: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    ticks = [t for t in (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if low <= t <= high]
    if len(ticks) > 1:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25, which="major")
    axes.spines[["top", "right"]].set_visible(False)


def _described(figure: Figure, results: Sequence[Result], title: str = "") -> Figure:
    figure.suptitle("\n".join(filter(None, (title, caption(results)))), fontsize=8, x=0.01, ha="left")
    return figure


def _share_shown(n_shown: int, n: int, which: str) -> str:
    return f"{n_shown} of {n}: {which}" if n_shown < n else ""


def _spread(results: Sequence[Result], n_most: int) -> list[Result]:
    """At most so many, evenly over the rates, highest rate first."""
    ordered = sorted(results, key=lambda r: (-bits_per_element(r), r["configuration"]["text"]))
    n = min(n_most, len(ordered))
    return [ordered[i * len(ordered) // n] for i in range(n)]


def _one_per_method(results: Sequence[Result], bits: float = 2.0) -> list[Result]:
    nearest: dict[str, Result] = {}
    for result in sorted(results, key=lambda r: abs(bits_per_element(r) - bits)):
        nearest.setdefault(result["configuration"]["recipe"], result)
    return list(nearest.values())


def _output_error(result: Result) -> float:
    errors = [row["output_error"] or 0.0 for row in result["layers"]]
    return sum(errors) / len(errors)
