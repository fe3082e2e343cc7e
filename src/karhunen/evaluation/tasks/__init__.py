"""What a model is asked. A task is a value; prepared for a model, it measures codecs against the dense model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from karhunen.evaluation.documents import SPLITS
from karhunen.evaluation.tasks.base import Task
from karhunen.evaluation.tasks.texts import Texts

ANSWERED: tuple[str, ...] = (
    "documents@1000", "passkeys@1000", "copying@1000", "calls@1000", "code@1000", "ruler",
)  # fmt: skip
"""Tasks with known answers in a full leaderboard. What a model fails without compression is not `conclusive`."""


def make_tasks(text: str, **sizes: Any) -> tuple[Task, ...]:
    """The tasks of a name: `texts:SPLIT@PROSE,CODE,LITERATURE`, a file of text, `ruler/KIND@TOKENS`, `needles@TOKENS`.

    So are `documents`, `chat`, `copying` and the other kinds that ask many questions to one text, `KIND@TOKENS`.
    `texts` alone is `texts:test`; two counts ask for no literature. `ruler` alone is the suite that the embedded models
    can do, `ruler@TOKENS` all thirteen kinds at that length. `sizes` are fields of `Texts`. ValueError on an unknown
    name, with the known ones listed.
    """
    name, at, after = text.partition("@")
    kind, colon, split = name.partition(":")
    if kind == "texts":
        if colon and split not in SPLITS:
            raise ValueError(f"task {text!r} is of unknown documents {split!r}; known: {', '.join(SPLITS)}")
        chosen = {"split": split} if colon else {}
        return (Texts(**sizes, **chosen, **(_documents(text, after) if at else {})),)
    from karhunen.evaluation.tasks.kinds import KINDS as ASKED
    from karhunen.evaluation.tasks.kinds import Kind
    from karhunen.evaluation.tasks.needles import Needles
    from karhunen.evaluation.tasks.ruler import KINDS, SUITE, Ruler

    if name == "ruler":
        chosen = [(kind, n) for kind in KINDS for n in _counts(text, after)] if after else SUITE
        return tuple(Ruler(kind, n_tokens=n) for kind, n in chosen)
    if name.startswith("ruler/") and name.removeprefix("ruler/") in KINDS:
        ruler = Ruler(name.removeprefix("ruler/"))
        return tuple(replace(ruler, n_tokens=n) for n in _counts(text, after)) if after else (ruler,)
    if name in ASKED:
        return tuple(Kind(name, n) for n in _counts(text, after)) if after else (Kind(name),)
    if name == "needles":
        return (Needles(lengths=_counts(text, after)) if after else Needles(),)
    if Path(text).exists():
        return (Texts(files=(str(Path(text)),), **sizes),)
    texts = "texts[:test|:development][@PROSE,CODE[,LITERATURE]]"
    known = [texts, "FILE", "needles", *ASKED, "ruler", *(f"ruler/{kind}" for kind in KINDS)]
    raise ValueError(f"unknown task {text!r}; known: {', '.join(known)}")


def _documents(text: str, given: str) -> dict[str, Any]:
    what = "two or three numbers of documents, of prose, of code and of literature, such as 2,1,1"
    counts = _counts(text, given, what)
    if len(counts) not in (2, 3):
        raise ValueError(f"task {text!r}: what stands after @ is {what}")
    if not any(counts):
        raise ValueError(f"task {text!r} has no document; ask for one at least, of prose, of code or of literature")
    n_prose, n_code, n_literature = (*counts, 0)[:3]
    return {"n_prose": n_prose, "n_code": n_code, "n_literature": n_literature}


def _counts(text: str, given: str, what: str = "a number of tokens") -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in given.split(",")):
        raise ValueError(f"task {text!r}: what stands after @ is {what}")
    return tuple(int(part) for part in given.split(","))
