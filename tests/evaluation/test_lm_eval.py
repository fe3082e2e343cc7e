"""A real task file on local data, through our cache and through lm-eval's own model."""

import json
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.conftest import codec_of

from karhunen.statistics.gathered import Statistics

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'karhunen[eval]'")

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}} Question: {{question}} Answer:"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WORDS = """
task: local_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}} Question: {{question}} Answer:"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "context": " ".join(f"Line {j} says {i * j % 7}." for j in range(8)),
            "question": f"What does line {i} say?",
            "choices": [str(i), str(i + 1), "nothing at all"],
            "label": i % 3,
        }
        for i in range(6)
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    for name, text in (("choice", CHOICE), ("words", WORDS)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def samples_of(model: Any, tasks: Path) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=tasks, include_defaults=False)
    found: Any = simple_evaluate(
        model=model, tasks=["local_choice", "local_words"], task_manager=known, bootstrap_iters=0, log_samples=True
    )
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_full_cache_scores_as_lm_evals_own_model(
    loaded: tuple[Any, Any], statistics: Statistics, tasks: Path
) -> None:
    from lm_eval.models.huggingface import HFLM

    from karhunen.evaluation.scores.lm_eval_model import KarhunenLM

    model, tokenizer = loaded
    plain = samples_of(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu"), tasks)
    ours = KarhunenLM(model, codec_of("full", statistics), tokenizer=tokenizer, batch_size=2, device="cpu")
    full = samples_of(ours, tasks)
    assert full["results"]["local_choice"] == pytest.approx(plain["results"]["local_choice"])
    for mine, theirs in zip(full["samples"]["local_choice"], plain["samples"]["local_choice"], strict=True):
        for a, b in zip(mine["filtered_resps"], theirs["filtered_resps"], strict=True):
            assert a[0] == pytest.approx(b[0], abs=1e-3)  # log-likelihoods: sums of some ten float32 logits
    for mine, theirs in zip(full["samples"]["local_words"], plain["samples"]["local_words"], strict=True):
        assert mine["resps"] == theirs["resps"]
    assert ours.report is not None
    assert ours.report.total.ratio == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_coded_cache_is_what_lm_eval_reads(loaded: tuple[Any, Any], statistics: Statistics, tasks: Path) -> None:
    from karhunen.evaluation.scores.lm_eval_model import KarhunenLM

    model, tokenizer = loaded
    likelihoods: list[float] = []
    for text in ("full", "int8:group=12", "int2:group=12"):
        lm = KarhunenLM(
            model, codec_of(text, statistics), chunk_tokens=16, tokenizer=tokenizer, batch_size=2, device="cpu"
        )
        found = samples_of(lm, tasks)
        rows = found["samples"]["local_choice"]
        likelihoods.append(sum(abs(r[0]) for row in rows for r in row["filtered_resps"]))
        assert lm.report is not None
        assert (lm.report.total.ratio > 1.5) == (text != "full")
    assert abs(likelihoods[2] - likelihoods[0]) > 20 * abs(likelihoods[1] - likelihoods[0]) > 0


@pytest.mark.filterwarnings("ignore")
def test_a_task_that_lm_eval_does_not_know_is_refused(loaded: tuple[Any, Any], tasks: Path) -> None:
    from karhunen.evaluation.tasks.harness import Harness

    with pytest.raises(ValueError, match="no task"):
        Harness(("local_choices",), str(tasks)).prepare(*loaded, seed=0, limit=None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_task_gives_both_scores_and_the_bytes(loaded: tuple[Any, Any], statistics: Statistics, tasks: Path) -> None:
    from karhunen.evaluation.tasks.harness import Harness

    prepared = Harness(("local_choice",), str(tasks)).prepare(*loaded, seed=0, limit=3)
    body = prepared.measure(codec_of("full", statistics))
    assert body["metrics"]["score"] == body["metrics"]["dense_score"]
    assert body["lm_eval"]["coded"]["local_choice"].keys() >= {"acc,none", "acc_norm,none"}
    assert body["cache"]["bytes"]["dense"] > 0


ARITHMETIC = [{"question": f"What is {i} and {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(1, 8)]
ANATOMY = [{"question": f"Which is {i}?", "choices": ["a", "b", "c", "d"], "answer": i % 4} for i in range(6)]
PAPER = [{"context": "A paper of few words.", "question": "Of what?", "answers": ["words"]} for _ in range(2)]


def rows(folder: Path, **splits: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for split, found in splits.items():
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, found)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param("mmlu_anatomy", marks=pytest.mark.slow), pytest.param("gsm8k", marks=pytest.mark.long)]
)
def test_lm_evals_own_tasks_run_on_files_of_the_disk(
    name: str, loaded: tuple[Any, Any], statistics: Statistics, tmp_path: Path
) -> None:
    from karhunen.evaluation.tasks.harness import Harness

    rows(tmp_path / "gsm8k", train=ARITHMETIC, test=ARITHMETIC[:2])
    rows(tmp_path / "mmlu_anatomy", dev=ANATOMY[:5], test=ANATOMY)
    task = Harness((name,), data=str(tmp_path), n_fewshot=0)
    prepared = task.prepare(*loaded, seed=0, limit=1)
    body = prepared.measure(codec_of("full", statistics))
    assert set(body["lm_eval"]["coded"]) == {name}
    assert body["lm_eval"]["coded"] == body["lm_eval"]["dense"]
    before = prepared.inputs
    (tmp_path / name / "test.jsonl").write_text(json.dumps({"gsm8k": ARITHMETIC, "mmlu_anatomy": ANATOMY}[name][0]))
    assert prepared.inputs != before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_longbench_runs_on_files_of_the_disk_or_says_what_lm_eval_lacks(
    loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    from karhunen.evaluation.tasks.harness import Harness

    rows(tmp_path / "longbench_qasper", test=PAPER)
    task = Harness(("longbench_qasper",), data=str(tmp_path))
    has_all = all(find_spec(name) for name in ("jieba", "fuzzywuzzy", "rouge"))
    with nullcontext() if has_all else pytest.raises(ValueError, match="longbench_qasper cannot be loaded"):
        assert task.prepare(*loaded, seed=0, limit=1).dense["longbench_qasper"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_data_that_a_task_cannot_use_is_refused_before_anything_runs(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    from karhunen.evaluation.tasks.harness import Harness

    with pytest.raises(ValueError, match="no files for gsm8k"):
        Harness(("gsm8k",), data=str(tmp_path))
    rows(tmp_path / "gsm8k", test=ARITHMETIC)
    with pytest.raises(ValueError, match="reads the split train"):
        Harness(("gsm8k",), data=str(tmp_path)).prepare(*loaded, seed=0, limit=None)
    rows(tmp_path / "mmlu", test=ANATOMY)
    with pytest.raises(ValueError, match="a group of lm-eval's tasks"):
        Harness(("mmlu",), data=str(tmp_path)).prepare(*loaded, seed=0, limit=None)
    (tmp_path / "gsm8k" / "train.csv").write_text("question,answer\n")
    with pytest.raises(ValueError, match="several kinds"):
        Harness(("gsm8k",), data=str(tmp_path))
