"""What a model is asked. A task is a value; prepared for a model, it measures codecs against the dense model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from karhunen.evaluation.tasks.base import Task
from karhunen.evaluation.tasks.texts import Texts


def make_task(text: str, **sizes: Any) -> Task:
    """A task by its name on the command line: `texts`, a text file, `ruler/KIND@TOKENS`, `needles@TOKENS,TOKENS`.

    `sizes` are fields of `Texts`. ValueError on an unknown name, with the known ones listed.
    """
    if text == "texts":
        return Texts(**sizes)
    from karhunen.evaluation.tasks.needles import Needles
    from karhunen.evaluation.tasks.ruler import KINDS, Ruler

    name, _, lengths = text.partition("@")
    if name.startswith("ruler/") and name.removeprefix("ruler/") in KINDS:
        ruler = Ruler(name.removeprefix("ruler/"))
        return replace(ruler, n_tokens=_counts(text, lengths)[0]) if lengths else ruler
    if name == "needles":
        return Needles(lengths=_counts(text, lengths)) if lengths else Needles()
    if Path(text).exists():
        return Texts(files=(str(Path(text)),), **sizes)
    known = ["texts", "FILE", "needles", *(f"ruler/{kind}" for kind in KINDS)]
    raise ValueError(f"unknown task {text!r}; known: {', '.join(known)}")


def _counts(text: str, given: str) -> tuple[int, ...]:
    if not all(part.strip().isdigit() for part in given.split(",")):
        raise ValueError(f"task {text!r}: what stands after @ is a number of tokens")
    return tuple(int(part) for part in given.split(","))
