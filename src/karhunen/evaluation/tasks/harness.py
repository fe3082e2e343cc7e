"""Tasks of lm-eval by name: LongBench, MMLU and the rest, or a user's own task files with local data.

The score of a result is the mean of each task's first metric; all metrics are in the result. Data comes from where the
task file says, the hub or the disk, or from a folder (local_data.py); without the data lm-eval's own words say what is
missing.
"""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, final
from weakref import finalize

from torch import nn

from karhunen.codec import Codec
from karhunen.evaluation.tasks.base import Prepared, Task
from karhunen.evaluation.tasks.local_data import check_splits, data_hash, local_splits, without, write_task_files
from karhunen.evaluation.tasks.questions import CONCLUSIVE

NO_METRICS = ("alias", "name", "sample_len", "sample_count")


@final
@dataclass(frozen=True)
class Harness(Task):
    """`tasks` are lm-eval's names; `include_path` is a folder of further task files, `data` one of their data."""

    tasks: tuple[str, ...]
    include_path: str = ""
    n_fewshot: int | None = None
    chat: bool = False
    data: str = ""

    def __post_init__(self) -> None:
        if self.data:
            local_splits(Path(self.data), self.tasks)

    @property
    def name(self) -> str:
        """The tasks' names."""
        return "lm-eval " + " ".join(self.tasks)

    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> Prepared:
        """Nothing is loaded yet; ValueError for a task that lm-eval does not know."""
        from lm_eval.tasks import TaskManager

        known = TaskManager(include_path=self.include_path) if self.include_path else _own_tasks()
        if missing := sorted(set(self.tasks) - set(known.all_tasks)):
            raise ValueError(f"lm-eval knows no task {missing}; `lm_eval ls tasks` lists what there is")
        if not self.data:
            return PreparedHarness(self, model, tokenizer, seed, limit, known)
        folder = mkdtemp(prefix="karhunen-lm-eval-")
        try:
            local = self._local(known, Path(folder))
        except ValueError:
            rmtree(folder)
            raise
        prepared = PreparedHarness(self, model, tokenizer, seed, limit, local)
        finalize(prepared, rmtree, folder)  # lm-eval reads the task files at every run
        return prepared

    def _local(self, known: Any, folder: Path) -> Any:
        from lm_eval.tasks import TaskManager

        if not hasattr(TaskManager, "load"):
            raise ValueError("--data needs the TaskManager of lm-eval 0.4.13; pip install -U lm-eval")
        splits = local_splits(Path(self.data), self.tasks)
        write_task_files(splits, known, folder)
        local = TaskManager(include_path=folder, include_defaults=False)
        for task in self.tasks:
            try:
                check_splits(local.load([task])["tasks"][task], splits[task], self.n_fewshot)
            except KeyError as error:
                raise without(task, str(error.args[0]), splits[task]) from error
            except ImportError as error:
                raise ValueError(f"lm-eval's {task} cannot be loaded: {error}") from error
        return local


@final
class PreparedHarness(Prepared):
    """lm-eval with a model; its own `hf` model is run once, for the dense scores."""

    def __init__(
        self, task: Harness, model: nn.Module, tokenizer: Any, seed: int, limit: int | None, known: Any
    ) -> None:
        self.task = task
        self.model = model
        self.tokenizer = tokenizer
        self.seed = seed
        self.limit = limit
        self.known = known

    @property
    def inputs(self) -> str:
        """Of what was asked for; lm-eval's task versions are in the result."""
        data = data_hash(Path(self.task.data), self.task.tasks) if self.task.data else ""
        return hashlib.sha256(repr((self.task, self.seed, self.limit, data)).encode()).hexdigest()[:16]

    @cached_property
    def dense(self) -> dict[str, dict[str, float]]:
        """Scores of lm-eval's own `hf` model."""
        from lm_eval.models import huggingface

        plain: Any = huggingface  # lm-eval's own types say nothing of a model's arguments
        return self._run(plain.HFLM(pretrained=self.model, tokenizer=self.tokenizer))[0]

    def measure(self, codec: Codec) -> dict[str, Any]:
        """Both models on all tasks."""
        from karhunen.evaluation.scores.lm_eval_model import KarhunenLM

        kind: Any = KarhunenLM
        coded_model = kind(self.model, codec, tokenizer=self.tokenizer)
        coded, versions = self._run(coded_model)
        if coded_model.report is None:
            raise ValueError(f"{self.task.name} never called the model, so nothing was measured")
        score, dense_score = (_mean_of_first(found) for found in (coded, self.dense))
        return {
            "metrics": {"score": score, "dense_score": dense_score, "conclusive": dense_score >= CONCLUSIVE},
            "lm_eval": {"coded": coded, "dense": self.dense, "versions": versions},
            "cache": coded_model.report.to_dict(),
        }

    def _run(self, model: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
        import lm_eval

        harness: Any = lm_eval
        found = harness.simple_evaluate(
            model=model,
            tasks=list(self.task.tasks),
            num_fewshot=self.task.n_fewshot,
            limit=self.limit,
            bootstrap_iters=0,
            log_samples=False,
            apply_chat_template=self.task.chat,
            task_manager=self.known,
            random_seed=self.seed,
            numpy_random_seed=self.seed,
            torch_random_seed=self.seed,
            fewshot_random_seed=self.seed,
        )
        scores = {
            name: {k: float(v) for k, v in row.items() if k not in NO_METRICS and isinstance(v, int | float)}
            for name, row in found["results"].items()
        }
        return scores, dict(found.get("versions", {}))


@cache
def _own_tasks() -> Any:
    """lm-eval's index of its thousands of task files, read once: it takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _mean_of_first(scores: dict[str, dict[str, float]]) -> float:
    firsts = [next(iter(row.values())) for row in scores.values() if row]
    if not firsts:
        raise ValueError("lm-eval gave no number for these tasks")
    return sum(firsts) / len(firsts)
