"""Calibrate on your own text, and see what that is worth on it.

    python examples/calibrate_on_your_text.py FILE_OR_FOLDER [MODEL]

A codec fits the kind of text that it was calibrated on. Half of yours is used to calibrate, the rest to compare.
"""

import sys

import torch

import karhunen
from karhunen.calibration.texts import calibration_text, read_texts
from karhunen.evaluation.scores.score import Document, run_dense, score


def main(path: str, name: str = "smollm2", calibration_tokens: int = 4096, read_tokens: int = 1024) -> None:
    model, tokenizer = karhunen.load(name)
    yours = "\n\n".join(read_texts([path]))
    half = len(yours) // 2
    recipe = karhunen.make("karhunen:bits=2")

    # The other half: the first part is read, then 64 tokens are scored while they read the compressed cache.
    tokens = tokenizer(yours[half:], return_tensors="pt", verbose=False)["input_ids"][0]
    if len(tokens) < read_tokens + 64:
        raise SystemExit(f"{path} is too short: half of it has {len(tokens)} tokens, {read_tokens + 64} are wanted")
    dense = run_dense(model, Document(path, tokens[: read_tokens + 64], read_tokens))

    for words, text in (("the built-in text", calibration_text()), ("your text", yours[:half])):
        statistics = karhunen.calibrate(model, text, recipe.needs(), tokenizer, max_tokens=calibration_tokens)
        found = score(model, karhunen.fit(recipe, statistics), dense)
        agree = found.agree.to(torch.float64).mean()
        print(f"calibrated on {words:17}: KL {found.kl.mean():.4f} nats, same next token {agree:.1%}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("give a text file or a folder of them")
    main(*sys.argv[1:])
