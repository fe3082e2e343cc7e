"""Every recipe on every task, each result a file; what is there already is not run again.

    tasks × recipes ─▶ configurations ─▶ those without a file ─▶ fit ─▶ measure ─▶ one JSON each

The dense model runs once per document, for all recipes; statistics are measured once per model, for the union of what
the recipes need. A killed run loses the result it was working on and nothing else.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.texts import calibration_text
from karhunen.codec import Codec
from karhunen.device import HOST, named
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.results.rates import Rated
from karhunen.evaluation.results.result import path_of, write_result
from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.evaluation.workers import end_with_parent, unheard, workers
from karhunen.fitting import fit
from karhunen.hf.describe import identity_of
from karhunen.monitoring.allocator import keep_freed_memory
from karhunen.recipe import Recipe
from karhunen.statistics.artifact import load_statistics, save_statistics
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.need import Need
from karhunen.values import to_dict

FEW_TOKENS = 512

Load = Callable[[], tuple[Any, Any]]
"""Loads model and tokenizer; with several jobs it is called in each process, so it must be picklable."""
OnStage = Callable[[str], None]


@final
@dataclass(frozen=True)
class Plan:
    """What is evaluated, and where results and statistics are kept. `model_name` is how the user calls the model;
    with `fixed_statistics` nothing is measured, and recipes that lack something are refused. Results name the
    `devices` that the model is loaded on, which are no part of a configuration."""

    model_name: str
    dtype: str
    tasks: tuple[Task, ...]
    rated: tuple[Rated, ...]
    results: Path
    statistics: Path
    seed: int = 0
    limit: int | None = None
    redo: bool = False
    calibration_tokens: int = 16384
    fixed_statistics: bool = False
    devices: tuple[str, ...] = (HOST.type,)


@final
@dataclass
class Outcome:
    """Files of results, made now or before, and why the others are missing."""

    made: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> list[Path]:
        """All results of the plan."""
        return sorted([*self.made, *self.kept])

    def add(self, other: "Outcome") -> None:
        """Take in what another process did."""
        self.made += other.made
        self.kept += other.kept
        self.refused |= other.refused


def evaluate(plan: Plan, load: Load, *, jobs: int = 1, on_stage: OnStage | None = None) -> Outcome:
    """Run what is missing. A recipe that does not fit the model is refused by name and the others go on.

    ValueError if a task does not fit the model, or the saved statistics belong to another one.
    """
    say = on_stage or (lambda _: None)
    if jobs < 2 or len(plan.rated) < 2:
        return _Run(plan, *load(), say).all()
    say(f"statistics, then {len(plan.rated)} recipes in {jobs} processes")
    with workers(1) as pool:  # its memory is given back with the process
        with unheard():
            measured = pool.submit(_measure_statistics, plan, load, torch.get_num_threads())
        measured.result()
    n = min(jobs, len(plan.rated))
    outcome = Outcome()
    wanted = [(task, rated) for task in range(len(plan.tasks)) for rated in plan.rated]
    settings = (plan, load, max(1, torch.get_num_threads() // n))
    with workers(n, _start, settings) as pool:
        with unheard():
            parts = pool.map(_work, wanted)
        for i, ((task, rated), part) in enumerate(zip(wanted, parts, strict=True)):
            say(f"{plan.tasks[task].name}: {rated.text} ({i + 1} of {len(wanted)})")
            outcome.add(part)
    return outcome


def gathered(
    model: nn.Module, tokenizer: Any, wanted: Iterable[Recipe], folder: Path, max_tokens: int, on_stage: OnStage
) -> Statistics:
    """The statistics in `folder` if they hold what the recipes need; what they lack is measured now, on the same text.

    Statistics of another text are measured again as a whole.
    """
    needs = {need for recipe in wanted for need in recipe.needs()}
    found: Statistics | None = None
    held: set[Need] = set()
    if (folder / "config.json").is_file():
        found = load_statistics(folder)
        if reason := found.model.mismatch(identity_of(model)):
            raise ValueError(f"the statistics in {folder} are of another model: {reason}")
        held = set.intersection(*(set(layer.measured) for layer in found.layers.values()))
        needs -= held
        if not needs:
            return found
    elif not needs:
        max_tokens = FEW_TOKENS  # shapes and rotations only
    on_stage(f"measuring {len(needs)} statistics on {max_tokens:,} tokens")
    told = _Told(on_stage)
    made = calibrate(model, calibration_text(), needs, tokenizer, max_tokens=max_tokens, progress=told)
    if found is not None and found.sources == made.sources:
        made = found.beside(made)
    elif found is not None and held:
        on_stage("the statistics there are of another text and are measured again")
        made = calibrate(model, calibration_text(), needs | held, tokenizer, max_tokens=max_tokens, progress=told)
    save_statistics(made, folder)
    n_bytes = sum(file.stat().st_size for file in folder.glob("*.*"))
    on_stage(f"the statistics stay in {folder} for the next run: {n_bytes / 1e6:,.0f} MB")
    return made


@final
@dataclass
class _Told:
    """Says how far a long calibration is, every tenth of it."""

    say: OnStage
    tenths: int = 0

    def __call__(self, done: int, total: int) -> None:
        if total > FEW_TOKENS and 10 * done // total > self.tenths:
            self.tenths = 10 * done // total
            self.say(f"measured {done:,} of {total:,} tokens")


def _measure_statistics(plan: Plan, load: Load, n_threads: int) -> None:
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(n_threads)
    _Run(plan, *load(), lambda _: None).statistics()


def _start(plan: Plan, load: Load, n_threads: int) -> None:
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(n_threads)
    _running.append(_Run(plan, *load(), lambda _: None))


def _work(wanted: tuple[int, Rated]) -> Outcome:
    run, (task, rated) = _running[0], wanted
    run.outcome = Outcome()
    run.one(run.plan.tasks[task], rated)
    return run.outcome


_running: list["_Run"] = []
"""In a worker: what it keeps from one recipe to the next, the model and the dense runs of the task at hand."""


@final
class _Run:
    """One process's share of a plan."""

    def __init__(self, plan: Plan, model: Any, tokenizer: Any, say: OnStage) -> None:
        self.plan = plan
        self.model = model
        self.tokenizer = tokenizer
        self.say = say
        self.known: Statistics | None = None
        self.fitted: dict[str, tuple[Codec, float]] = {}  # tables of a codec are small, and every task asks for it
        self.at: tuple[Task, Prepared] | None = None
        self.outcome = Outcome()

    def all(self) -> Outcome:
        """Task by task, recipe by recipe."""
        for task in self.plan.tasks:
            for rated in self.plan.rated:
                self.one(task, rated)
        return self.outcome

    def one(self, task: Task, rated: Rated) -> None:
        """One recipe on one task, unless its result is there. Dense runs last from the first recipe of a task to the
        first of another."""
        if self.at is None or self.at[0] is not task:
            self.at = None  # what it holds is given back first
            self.at = task, task.prepare(self.model, self.tokenizer, self.plan.seed, self.plan.limit)
        prepared = self.at[1]
        configuration = self._configuration(task, prepared, rated)
        if not self._keep(configuration):
            self.say(f"{task.name}: {rated.text}")
            self._one(rated, configuration, prepared)

    def statistics(self) -> Statistics:
        """Of the model, for all recipes of the plan; given ones are taken as they are."""
        if self.known is None:
            plan = self.plan
            wanted = [] if plan.fixed_statistics else [rated.recipe for rated in plan.rated]
            self.known = gathered(
                self.model, self.tokenizer, wanted, plan.statistics, plan.calibration_tokens, self.say
            )
        return self.known

    def _keep(self, configuration: Mapping[str, Any]) -> bool:
        path = path_of(self.plan.results, configuration)
        if self.plan.redo or not path.is_file():
            return False
        self.outcome.kept.append(path)
        return True

    def _one(self, rated: Rated, configuration: Mapping[str, Any], prepared: Prepared) -> None:
        try:
            codec, fit_seconds = self._codec(rated)
            start = time.perf_counter()
            body = prepared.measure(codec)
        except ValueError as error:
            self.outcome.refused[rated.text] = str(error)
            self.say(f"{rated.text} is refused: {error}")
            return
        about = {
            "codec": {"fingerprint": codec.fingerprint(), "table_bytes": codec.table_bytes()},
            "calibration": {"sources": list(codec.origin.calibration), "n_tokens": codec.origin.n_tokens},
            "fit_seconds": fit_seconds,
            "measure_seconds": time.perf_counter() - start,
        }
        where = ", ".join(named(torch.device(name)) for name in self.plan.devices)
        made = {**asdict(provenance()), "device": where, **about}
        self.outcome.made.append(write_result(self.plan.results, configuration, {**body, "made": made}))

    def _codec(self, rated: Rated) -> tuple[Codec, float]:
        if rated.text not in self.fitted:
            start = time.perf_counter()
            self.fitted[rated.text] = fit(rated.recipe, self.statistics()), time.perf_counter() - start
            if len(self.plan.tasks) == 1:
                return self.fitted.pop(rated.text)
        return self.fitted[rated.text]

    def _configuration(self, task: Task, prepared: Prepared, rated: Rated) -> dict[str, Any]:
        identity = identity_of(self.model)
        statistics = self.statistics() if rated.recipe.needs() else None
        return {
            "model": self.plan.model_name,
            "architecture": identity.architecture,
            "config_hash": identity.config_hash,
            "weights_hash": identity.weights_hash,
            "dtype": self.plan.dtype,
            "task": {"name": task.name, **to_dict(task)},
            "inputs": prepared.inputs,
            "recipe": rated.name,
            "text": rated.text,
            "rate": rated.rate,
            "recipe_fingerprint": rated.recipe.fingerprint(),
            "calibration": list(statistics.sources) if statistics else [],
            "seed": self.plan.seed,
        }
