"""At which lengths a model can do RULER's kinds at all: the dense score of each, so that a suite can be chosen.

A kind that the dense model fails says nothing about a codec. What reached CONCLUSIVE is the suite `ruler` of
`karhunen evaluate`. Each score is written as it comes, and those that the file holds are not asked again.

    python benchmarks/ruler_settings.py --tokens 500 --tokens 1000 --json results/measured/ruler-smollm2.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.continuation import dense_text, read_prompt, stop_tokens
from karhunen.evaluation.tasks.questions import CONCLUSIVE, PreparedQuestions
from karhunen.evaluation.tasks.ruler import KINDS, Ruler
from karhunen.hf.embedded import load


def main() -> None:
    """Ask, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, action="append", help="length of a question; repeatable")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="repeatable; all")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    stop = stop_tokens(model, tokenizer)
    about = {"model": given.model, "questions": given.questions}
    rows = kept_rows(given.json, about)
    for kind in given.kind or KINDS:
        for n_tokens in given.tokens or (500, 1000, 1500):
            row = next((r for r in rows if (r["kind"], r["tokens"]) == (kind, n_tokens)), None)
            if row is None:
                row = asked(model, tokenizer, kind, n_tokens, given.questions, stop)
                rows.append(row)
                if given.json:
                    given.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
            score = row.get("refused") or f"{row['score']:.2f}{'  can be done' if row['conclusive'] else ''}"
            print(f"{kind:16} {n_tokens:5} tokens  {score}", flush=True)


def kept_rows(path: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """What the file holds already; those are not asked again. ValueError if it is of another model or number."""
    if path is None or not path.is_file():
        return []
    held = json.loads(path.read_text(encoding="utf-8"))
    if any(held[name] != value for name, value in about.items()):
        raise ValueError(f"{path} holds other questions than {about}; name another file")
    return held["rows"]


def asked(
    model: Any, tokenizer: Any, kind: str, n_tokens: int, questions: int, stop: tuple[int, ...]
) -> dict[str, Any]:
    """The dense score of one kind at one length, or why there is none."""
    made = {"commit": provenance().commit, "date": provenance().date}
    try:
        prepared = Ruler(kind, n_tokens, questions).prepare(model, tokenizer, 0, None)
    except ValueError as error:
        return {"kind": kind, "tokens": n_tokens, "refused": str(error), **made}
    assert isinstance(prepared, PreparedQuestions), "RULER asks questions"
    scores: list[float] = []
    for question, tokens in zip(prepared.questions, prepared.tokens, strict=True):
        said = dense_text(model, read_prompt(model, tokens), question.max_new_tokens, stop)
        scores.append(question.score(str(tokenizer.decode(said, skip_special_tokens=True))))
    score = sum(scores) / len(scores)
    return {"kind": kind, "tokens": n_tokens, "score": score, "conclusive": score >= CONCLUSIVE, **made}


if __name__ == "__main__":
    main()
