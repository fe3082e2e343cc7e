"""The verbs that measure: evaluate, verify, leaderboard, report, compare. Nothing heavy is imported before one runs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from karhunen.cli.options import (
    DEFAULT_DEVICE,
    DEFAULT_MODEL,
    CodecFolder,
    Devices,
    Dtype,
    Json,
    Model,
    Texts,
    from_0_to_1,
    not_negative,
    path,
    word,
)

scoring = typer.Typer()

Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe", help="A recipe, at all rates, or with options as written; repeatable; default: all.", parser=word
    ),
]
Rates = Annotated[list[int] | None, typer.Option("--rate", help="Times smaller, about: 4, 8, 12 or 16; repeatable.")]
ExactWindow = Annotated[
    str,
    typer.Option(
        "--window", help="SINKS,RECENT: exact tokens for all recipes; `own`: as each recipe says.", parser=word
    ),
]
Results = Annotated[Path, typer.Option("--results", help="Folder of results; existing results are kept.", parser=path)]
SavedStatistics = Annotated[
    Path | None,
    typer.Option(
        "--statistics", help="Statistics to fit from; measured and kept there if nothing is there yet.", parser=path
    ),
]
Prefill = Annotated[
    str,
    typer.Option(
        "--prefill", help="exact: the prompt is read exactly; chunked: it reads its own coded history.", parser=word
    ),
]
PrefillTokens = Annotated[int, typer.Option("--prefill-tokens", min=1, help="Context before the scored tokens.")]
ScoredTokens = Annotated[int, typer.Option("--scored-tokens", min=2)]
GeneratedTokens = Annotated[int, typer.Option("--generated-tokens", min=0, help="Tokens to write freely; 0: none.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Most documents or questions of a task.")]
Seed = Annotated[int, typer.Option("--seed", help="Chooses documents and questions.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Processes; each holds the model.")]
CalibrationTokens = Annotated[
    int, typer.Option("--calibration-tokens", min=1, help="Tokens to calibrate on, if there are no statistics yet.")
]
Redo = Annotated[bool, typer.Option("--redo", help="Run again what has a result already.")]


@scoring.command()
def evaluate(
    model: Model = DEFAULT_MODEL,
    recipe: Recipes = None,
    rate: Rates = None,
    window: ExactWindow = "4,128",
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            help="texts[:test|:development][@PROSE,CODE,LITERATURE], FILE, needles[@LENGTHS], ruler/KIND[@TOKENS]; "
            "repeatable; default: texts:test.",
            parser=word,
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Names of lm-eval, separated by commas: mmlu,longbench.", parser=word)
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="A folder of further task files for --tasks.", parser=path)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A folder of data for --tasks: FOLDER/TASK/SPLIT.jsonl, not the hub.", parser=path),
    ] = None,
    results: Results = Path("results"),
    statistics: SavedStatistics = None,
    prefill: Prefill = "exact",
    prefill_tokens: PrefillTokens = 2560,
    scored_tokens: ScoredTokens = 384,
    generated_tokens: GeneratedTokens = 64,
    limit: Limit = None,
    seed: Seed = 0,
    jobs: Jobs = 1,
    redo: Redo = False,
    calibration_tokens: CalibrationTokens = 16384,
    dtype: Dtype = "float32",
    device: Devices = DEFAULT_DEVICE,
    as_json: Json = False,
) -> int:
    """Score recipes against the uncompressed model. One JSON file per result; existing results are kept."""
    from karhunen.cli.evaluate import Wanted, run

    sizes = (prefill, prefill_tokens, scored_tokens, generated_tokens)
    named = tuple(task or (() if tasks else ("texts",)))
    chosen = (tuple(recipe or ()), tuple(rate or (4, 8, 12)), window, named)
    harness = (tuple(filter(None, (tasks or "").split(","))), include_path, data)
    wanted = Wanted(model, dtype, device, *chosen, results, statistics, *sizes, limit, seed, jobs, redo, *harness)
    return run(replace(wanted, calibration_tokens=calibration_tokens), as_json)


@scoring.command()
def verify(
    codec: CodecFolder,
    model: Model = DEFAULT_MODEL,
    text: Texts = None,
    max_kl: Annotated[
        float, typer.Option("--max-kl", metavar="FLOAT", parser=not_negative, help="Mean logit KL, nats.")
    ] = 0.02,
    max_kl_p999: Annotated[
        float,
        typer.Option("--max-kl-p999", metavar="FLOAT", parser=not_negative, help="99.9th percentile of the KL, nats."),
    ] = 1.0,
    max_kl_pages: Annotated[
        float,
        typer.Option(
            "--max-kl-pages", metavar="FLOAT", parser=not_negative, help="Mean KL after a prompt restored from pages."
        ),
    ] = 0.05,
    min_top1: Annotated[
        float,
        typer.Option(
            "--min-top1",
            metavar="FLOAT",
            parser=from_0_to_1,
            help="Share of tokens whose most likely successor is the same.",
        ),
    ] = 0.95,
    min_needles: Annotated[
        float,
        typer.Option(
            "--min-needles",
            metavar="FLOAT",
            parser=from_0_to_1,
            help="Share of the facts that the uncompressed model finds.",
        ),
    ] = 0.9,
    min_calls: Annotated[
        float,
        typer.Option(
            "--min-calls",
            metavar="FLOAT",
            parser=from_0_to_1,
            help="Share of the tool calls that the uncompressed model is sure of.",
        ),
    ] = 0.9,
    prefill_tokens: PrefillTokens = 2560,
    scored_tokens: ScoredTokens = 384,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Most texts to score.")] = 3,
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="One short text, six needles, eight tool calls.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not write the report card into the codec.")] = False,
    dtype: Dtype = "float32",
    device: Devices = DEFAULT_DEVICE,
    as_json: Json = False,
) -> int:
    """Measure a codec against the uncompressed model. Keep the report card inside it. Exit code 3 if a gate fails."""
    from karhunen.cli.verify import run

    limits = {"kl": max_kl, "kl_p999": max_kl_p999, "pages": max_kl_pages, "top1": min_top1}
    limits |= {"needles": min_needles, "tool_calls": min_calls}
    sizes = {"prefill_tokens": prefill_tokens, "scored_tokens": scored_tokens, "n_documents": documents}
    return run(codec, model, tuple(text or ()), limits, sizes, seed, dtype, device, not dry_run, quick, as_json)


@scoring.command()
def leaderboard(
    model: Model = DEFAULT_MODEL,
    recipe: Recipes = None,
    rate: Rates = None,
    window: ExactWindow = "4,128",
    results: Results = Path("results/leaderboard"),
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the page; default: RESULTS/report.", parser=path),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also the tasks with known answers, for hours; a killed run goes on.")
    ] = False,
    limit: Limit = None,
    statistics: SavedStatistics = None,
    prefill_tokens: PrefillTokens = 2048,
    scored_tokens: ScoredTokens = 192,
    generated_tokens: GeneratedTokens = 24,
    jobs: Jobs = 1,
    redo: Redo = False,
    dtype: Dtype = "float32",
    device: Devices = DEFAULT_DEVICE,
    as_json: Json = False,
) -> int:
    """Score all recipes at three rates. Test documents, then the report; continues where it stopped."""
    from karhunen.cli.evaluate import Wanted, leaderboard_tasks, run_leaderboard

    chosen = (tuple(recipe or ()), tuple(rate or (4, 8, 12)), window, leaderboard_tasks(full))
    sizes = ("exact", prefill_tokens, scored_tokens, generated_tokens)
    wanted = Wanted(model, dtype, device, *chosen, results, statistics, *sizes, limit, 0, jobs, redo)
    return run_leaderboard(wanted, output or results / "report", as_json)


@scoring.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Folders or files of results.", parser=path)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the page and its pictures.", parser=path)
    ] = Path("results/report"),
    readme: Annotated[
        Path | None, typer.Option("--readme", help="Also put the table between the markers of this file.", parser=path)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write results as one HTML page. It needs no network; pictures and a Markdown table beside it."""
    from karhunen.cli.report import run

    run(tuple(results), output, readme, as_json)


@scoring.command()
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A recipe among the results, or a folder of results.", parser=word)
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another recipe or folder.", parser=word)],
    results: Annotated[Path, typer.Option("--results", help="Folder of results.", parser=path)] = Path("results"),
    as_json: Json = False,
) -> None:
    """Compare two sets of results. Same documents; with the interval of the difference."""
    from karhunen.cli.compare import run

    run(a, b, results, as_json)
