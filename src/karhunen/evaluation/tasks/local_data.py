"""lm-eval's own tasks on data of the disk: MMLU, GSM8K, LongBench without the hub.

    FOLDER/TASK/SPLIT.jsonl ─▶ a task file that includes lm-eval's and names these files ─▶ TaskManager

A split is a file: `test.jsonl`, `train.jsonl`, … with the fields of the data set that lm-eval's task file names; so may
`.json`, `.parquet` and `.csv` be. Prompts, answers and metrics stay lm-eval's.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def local_splits(data: Path, tasks: Sequence[str]) -> dict[str, dict[str, Path]]:
    """The file of each split of each task; ValueError for a task without one, or with files of several kinds."""
    return {task: _splits(data / task, task) for task in tasks}


def data_hash(data: Path, tasks: Sequence[str]) -> str:
    """Of every byte of these files, and of the names of their splits."""
    digest = hashlib.sha256()
    for task, files in local_splits(data, tasks).items():
        for split, file in files.items():
            digest.update(f"{task} {split} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def write_task_files(splits: dict[str, dict[str, Path]], known: Any, folder: Path) -> None:
    """One task file for each task into `folder`; `known` is lm-eval's TaskManager. ValueError for a group of tasks."""
    for task, files in splits.items():
        theirs = known.task_index[task].yaml_path
        if theirs is None or task in {*known.all_groups, *known.all_tags}:
            raise ValueError(
                f"{task} is a group of lm-eval's tasks; with --data name its tasks, each has its own files"
            )
        reader = READERS[next(iter(files.values())).suffix]
        named = "".join(f"    {split}: {str(file.resolve())!r}\n" for split, file in files.items())
        (folder / f"{task}.yaml").write_text(
            f"include: {str(Path(theirs).resolve())!r}\ntask: {task}\ndataset_path: {reader}\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files:\n{named}",
            encoding="utf-8",
        )


def check_splits(task: Any, files: dict[str, Path], n_fewshot: int | None) -> None:
    """ValueError unless every split that the task reads has a file; `n_fewshot` None: as many as the task says."""
    config = task.config
    wanted = [config.test_split or config.validation_split]
    if config.num_fewshot if n_fewshot is None else n_fewshot:
        wanted.append(config.fewshot_split or config.training_split)
    if missing := [split for split in wanted if split and split not in files]:
        raise without(config.task, missing[0], files)


def without(task: str, split: str, files: dict[str, Path]) -> ValueError:
    """What to say of a split that no file holds."""
    folder = next(iter(files.values())).parent
    return ValueError(f"lm-eval's {task} reads the split {split}, {folder} holds {', '.join(files)}; add {split}.jsonl")


def _splits(folder: Path, task: str) -> dict[str, Path]:
    found = [file for file in sorted(folder.glob("*")) if file.suffix in READERS]
    files = {file.stem: file for file in found}
    if not files:
        raise ValueError(f"--data has no files for {task}: {folder}/SPLIT.jsonl, such as {folder / 'test.jsonl'}")
    if len({file.suffix for file in found}) > 1:
        raise ValueError(f"the splits in {folder} are files of several kinds; use one of {', '.join(READERS)}")
    return files
