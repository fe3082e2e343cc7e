"""The picture of `karhunen plan`: memory against context, a line for each rate, and what the devices have."""

from typing import Any

from matplotlib.figure import Figure

from karhunen.evaluation.results.plots import BASELINES, COLOURS, MARKERS, OURS, style
from karhunen.planning.plan import Plan, Row

SHORTEST, POINTS = 1024, 25
LONGEST = 1 << 20  # tokens, where memory sets no end


def plan_figure(plan: Plan) -> Figure:
    """Left: weights and cache of the plan's batch, up to a little more than what fits. Right: times smaller than dense,
    by context: what the exact window and layers that do not grow leave of the nominal ratio."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = _tokens(plan)
    shape, work = plan.shape, plan.work
    for i, row in enumerate(plan.rows):
        look = _look(row, i)
        held = [work.batch * row.rate.held_bytes(shape, n, work.cache_bits) for n in tokens]
        every = [((plan.weight_bytes or 0) + n_bytes) / 1e9 for n_bytes in held]
        left.plot(tokens, every, label=row.rate.name, markevery=4, markersize=5, lw=1.4, **look)
        ratios = [row.rate.ratio(shape, n, work.cache_bits) for n in tokens]
        right.plot(tokens, ratios, markevery=4, markersize=5, lw=1.4, **look)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_said_tokens)
        axes.set_xlabel("tokens of context")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if shape.positions is not None and shape.positions < tokens[-1]:
            axes.axvline(shape.positions, color="#777777", lw=0.8, ls=":")
    usable = plan.machine.usable_bytes
    if usable is not None:
        left.axhline(usable / 1e9, color="#777777", lw=1, ls="--")
        left.annotate("memory, less the reserve", (tokens[0], usable / 1e9), (2, 3), textcoords="offset points",
                      fontsize=7, color="#555555")  # fmt: skip
        left.set_ylim(0, 1.25 * usable / 1e9)
    else:
        left.set_ylim(bottom=0)
    left.set_ylabel("weights and cache, GB" if plan.weight_bytes is not None else "cache, GB")
    right.set_ylabel("times smaller than the uncompressed cache")
    right.set_ylim(bottom=0)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(_caption(plan), fontsize=8, x=0.01, ha="left")
    return figure


def _tokens(plan: Plan) -> list[int]:
    """Evenly on a log scale, to twice the longest context that fits at any rate."""
    longest = [row.capacity.max_context for row in plan.rows if row.capacity.max_context]
    end = 2 * max(longest) if longest else max(LONGEST, plan.work.context)
    end = max(end, 4 * SHORTEST)
    return [round(SHORTEST * (end / SHORTEST) ** (i / (POINTS - 1))) for i in range(POINTS)]


def _look(row: Row, index: int) -> dict[str, Any]:
    """The method's own colour and line where it stands alone; rates of one method are told apart by marker."""
    name = row.rate.name.partition(":")[0]
    if index == 0:
        return {"color": "#333333", "marker": "", "linestyle": "-"}
    if name == OURS or name in BASELINES:
        return {**style(name), "marker": MARKERS[index % len(MARKERS)]}
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "linestyle": "--"}


def _said_tokens(n: float, _: Any = None) -> str:
    """4k, 1M: powers of two in short."""
    return f"{n / 2**20:g}M" if n >= 2**20 else f"{n / 2**10:g}k" if n >= 2**10 else f"{n:g}"


def _caption(plan: Plan) -> str:
    work, shape = plan.work, plan.shape
    many = f"{work.batch} sequence{'s' * (work.batch > 1)}"
    weights = "" if plan.weight_bytes is None else f", weights {plan.weight_bytes / 1e9:.1f} GB"
    limit = "" if shape.positions is None else f" · the model reads {shape.positions:,} positions (dotted)"
    return f"{shape.name}, {many}, {work.cache_dtype} cache{weights}{limit} · arithmetic, not a measurement"
