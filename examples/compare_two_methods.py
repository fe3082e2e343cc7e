"""Compare two methods on the same text: error, changed tokens, and the bytes that each one held.

    python examples/compare_two_methods.py RECIPE RECIPE [MODEL]

`karhunen evaluate` and `karhunen compare` do this on many documents and with confidence intervals.
"""

import sys

import torch

import karhunen
from karhunen.calibration.texts import calibration_text, evaluation_text
from karhunen.evaluation.scores.score import Document, run_dense, score


def main(
    one: str = "quarot:bits=2", other: str = "int2", name: str = "smollm2", read_tokens: int = 1024, n_scored: int = 64
) -> None:
    model, tokenizer = karhunen.load(name)
    tokens = tokenizer(evaluation_text()[:20000], return_tensors="pt", verbose=False)["input_ids"][0]
    dense = run_dense(model, Document("evaluation text", tokens[: read_tokens + n_scored], read_tokens))

    print(f"{n_scored} tokens after {read_tokens:,} that were compressed")
    for text in (one, other):
        recipe = karhunen.make(text)
        codec = karhunen.fit(
            recipe, karhunen.calibrate(model, calibration_text(), recipe.needs(), tokenizer, max_tokens=4096)
        )
        found = score(model, codec, dense)
        bits = found.report.total.coded_bits_per_element
        agree = found.agree.to(torch.float64).mean()
        print(f"{text:16} {bits:5.2f} bits   KL {found.kl.mean():.4f} nats   same next token {agree:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
