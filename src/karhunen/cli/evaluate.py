"""`karhunen evaluate` and `karhunen leaderboard`: results as files, then a table of them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from karhunen.cli.loading import DTYPES, fetching, load_model, placed, torch_dtype
from karhunen.cli.screen import Screen, grid, rounded

if TYPE_CHECKING:
    from karhunen.evaluation.runner import Outcome, Plan
    from karhunen.evaluation.tasks.base import Task


@final
@dataclass(frozen=True)
class Wanted:
    """The arguments of both verbs, as given."""

    model: str
    dtype: str
    device: str
    recipes: tuple[str, ...]
    rates: tuple[int, ...]
    window: str
    tasks: tuple[str, ...]
    results: Path
    statistics: Path | None
    prefill: str
    prefill_tokens: int
    scored_tokens: int
    generated_tokens: int
    limit: int | None
    seed: int
    jobs: int
    redo: bool
    harness: tuple[str, ...] = ()
    include_path: Path | None = None
    data: Path | None = None
    calibration_tokens: int = 16384


def run(wanted: Wanted, as_json: bool) -> int:
    """Evaluate, and show what was measured; 2 if every recipe was refused."""
    with Screen(as_json).open() as screen:
        outcome = evaluate(screen, wanted)
        show(screen, outcome)
        return 0 if outcome.paths else 2


def leaderboard_tasks(full: bool) -> tuple[str, ...]:
    """The test documents; `full` adds what SmolLM2 without compression answers (docs/tasks.md)."""
    from karhunen.evaluation.tasks import ANSWERED

    return ("texts", *ANSWERED) if full else ("texts",)


def run_leaderboard(wanted: Wanted, output: Path, as_json: bool) -> int:
    """Evaluate the default suite, then write page, pictures and Markdown of all results in the folder."""
    from karhunen.cli.report import write
    from karhunen.evaluation.results.report import check_report_target

    check_report_target(output)
    with Screen(as_json).open() as screen:
        outcome = evaluate(screen, wanted)
        if outcome.paths:
            write(screen, (wanted.results,), output, document=False)
        show(screen, outcome)
        return 0 if outcome.paths else 2


def evaluate(screen: Screen, wanted: Wanted) -> "Outcome":
    """Everything that can be refused is refused before the model is loaded."""
    from karhunen.evaluation.runner import evaluate as run_plan
    from karhunen.folder import check_writable

    plan = plan_of(wanted)
    check_writable(plan.results)
    where = placed(screen, wanted.model, wanted.dtype, plan.devices)
    one = partial(load_model, screen, wanted.model, wanted.dtype, where)
    return run_plan(
        plan, one if wanted.jobs < 2 else _loader(screen, wanted, where), jobs=wanted.jobs, on_stage=screen.log
    )


def plan_of(wanted: Wanted) -> "Plan":
    """The plan that the arguments ask for; ValueError on the first that is wrong."""
    from karhunen import recipes
    from karhunen.calibration.placement import chosen
    from karhunen.evaluation.results.rates import rated
    from karhunen.evaluation.runner import Plan
    from karhunen.evaluation.tasks import make_tasks

    if wanted.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {wanted.dtype!r}; known: {', '.join(DTYPES)}")
    sizes = {
        "prefill": wanted.prefill,
        "prefill_tokens": wanted.prefill_tokens,
        "scored_tokens": wanted.scored_tokens,
        "generated_tokens": wanted.generated_tokens,
    }
    name = Path(wanted.model).name
    own = wanted.results / "statistics" / f"{name}-{wanted.dtype}"
    given = wanted.statistics
    return Plan(
        model_name=name,
        dtype=wanted.dtype,
        devices=chosen(wanted.device),
        tasks=(*(task for text in wanted.tasks for task in make_tasks(text, **sizes)), *_harness(wanted)),
        rated=tuple(rated(wanted.recipes or recipes.names(), wanted.rates, _window(wanted.window))),
        results=wanted.results,
        statistics=given or own,
        seed=wanted.seed,
        limit=wanted.limit,
        redo=wanted.redo,
        calibration_tokens=wanted.calibration_tokens,
        fixed_statistics=given is not None and given.exists(),
    )


def show(screen: Screen, outcome: "Outcome") -> None:
    """One row per result, and each refusal with its reason."""
    from karhunen.evaluation.results.result import read_result
    from karhunen.evaluation.results.rows import COLUMNS, rows_of

    rows = rows_of([read_result(path) for path in outcome.paths])
    rows.sort(key=lambda row: (row.task, row.model, row.bits_per_element))
    table = grid(*COLUMNS, right=tuple(range(3, len(COLUMNS))))
    for row in rows:
        table.add_row(*row.cells())
    if rows:
        screen.table(table)
    screen.say(f"{len(outcome.made)} results made, {len(outcome.kept)} were there already")
    for text, reason in sorted(outcome.refused.items()):
        screen.log(f"not measured: {text}: {reason}")
    screen.document(
        rounded(
            {
                "made": [str(path) for path in sorted(outcome.made)],
                "kept": [str(path) for path in sorted(outcome.kept)],
                "refused": outcome.refused,
                "rows": [row.to_dict() for row in rows],
            }
        )
    )


def _harness(wanted: Wanted) -> "tuple[Task, ...]":
    if not wanted.harness:
        if wanted.data is not None:
            raise ValueError("--data is of lm-eval's tasks; name them with --tasks, such as --tasks gsm8k")
        return ()
    from karhunen.evaluation.tasks.harness import Harness

    return (Harness(wanted.harness, str(wanted.include_path or ""), data=str(wanted.data or "")),)


def _loader(screen: Screen, wanted: Wanted, where: Any) -> Any:
    """What each process loads, fetched once with its progress before they start. No weights are read here."""
    from karhunen.hf.embedded import load
    from karhunen.hf.skeleton import skeleton

    dtype = torch_dtype(wanted.dtype)
    with fetching(screen, f"looking at {Path(wanted.model).name}") as on_fetch:
        skeleton(wanted.model, dtype, on_fetch)
    return partial(load, wanted.model, dtype=dtype, device_map=where)


def _window(text: str) -> tuple[int, int] | None:
    if text == "own":
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--window {text!r} is neither two counts of tokens such as 4,128 nor `own`")
    return int(parts[0]), int(parts[1])
