"""At which lengths a model can do RULER's kinds at all: the dense score of each, so that a suite can be chosen.

A kind that the dense model fails says nothing about a codec. What reached CONCLUSIVE is the suite `ruler` of
`karhunen evaluate`.

    python benchmarks/ruler_settings.py --tokens 500 --tokens 1500 --json results/measured/ruler-smollm2.json
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from karhunen.evaluation.continuation import dense_text, read_prompt, stop_tokens
from karhunen.evaluation.provenance import provenance
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
    rows: list[dict[str, object]] = []
    for kind in given.kind or KINDS:
        for n_tokens in given.tokens or (500, 1500):
            try:
                prepared = Ruler(kind, n_tokens, given.questions).prepare(model, tokenizer, 0, None)
            except ValueError as error:
                print(f"{kind:16} {n_tokens:5} tokens  {error}", flush=True)
                rows.append({"kind": kind, "tokens": n_tokens, "refused": str(error)})
                continue
            assert isinstance(prepared, PreparedQuestions), "RULER asks questions"
            scores: list[float] = []
            for question, tokens in zip(prepared.questions, prepared.tokens, strict=True):
                said = dense_text(model, read_prompt(model, tokens), question.max_new_tokens, stop)
                scores.append(question.score(str(tokenizer.decode(said, skip_special_tokens=True))))
            score = sum(scores) / len(scores)
            rows.append({"kind": kind, "tokens": n_tokens, "score": score, "conclusive": score >= CONCLUSIVE})
            print(
                f"{kind:16} {n_tokens:5} tokens  {score:.2f}{'' if score < CONCLUSIVE else '  can be done'}", flush=True
            )
    if given.json:
        made = asdict(provenance())
        body = {"model": given.model, "questions": given.questions, "rows": rows, "made": made}
        given.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
