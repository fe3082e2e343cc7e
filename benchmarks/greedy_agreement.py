"""Attention from bytes says what attention over decoded keys and values says: the same next token, step by step.

Two caches of one codec hold the same prompt. Both are fed the tokens that the first one chooses; the second reads
decoded keys and values through SDPA. Counted is how often their likeliest next tokens are the same.

    python benchmarks/greedy_agreement.py --statistics FOLDER --json results/measured/agreement-smollm2.json
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from karhunen.codec import Codec
from karhunen.evaluation.documents import default_documents
from karhunen.evaluation.results.provenance import provenance
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.embedded import load
from karhunen.hf.probe import cache_argument
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--recipe", default="karhunen")
    given_by = parser.add_mutually_exclusive_group(required=True)
    given_by.add_argument("--statistics", type=Path)
    given_by.add_argument("--codec", type=Path)
    parser.add_argument("--prefill-tokens", type=int, default=2560)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    codec = (
        Codec.from_pretrained(given.codec)
        if given.codec
        else fit(make(given.recipe), load_statistics(given.statistics))
    )
    counts = {"n_prose": 1, "n_code": 1, "n_literature": 1}
    documents = default_documents(tokenizer, "test", **counts, prefill_tokens=given.prefill_tokens, scored_tokens=2)
    same, most = 0, 0.0
    for document in documents:
        prompt = document.tokens[: given.prefill_tokens]
        found, far = agreement(model, codec, prompt, given.steps)
        same, most = same + found, max(most, far)
        print(f"{document.name}: {found} of {given.steps} steps, logits at most {far:.2g} apart", flush=True)
    n = given.steps * len(documents)
    print(f"{same} of {n} greedy steps: {same / n:.4f}")
    if given.json:
        body = {
            "model": given.model, "recipe": codec.origin.recipe, "steps": n, "same": same, "share": same / n,
            "largest_logit_difference": most, "prefill_tokens": given.prefill_tokens, "made": asdict(provenance()),
        }  # fmt: skip
        given.json.write_text(json.dumps(body, indent=1) + "\n")


@torch.no_grad()
def agreement(model: torch.nn.Module, codec: Codec, prompt: torch.Tensor, steps: int) -> tuple[int, float]:
    """Steps whose likeliest tokens are the same, and the largest difference of two logits."""
    caches = {"karhunen": CompressedCache(model, codec), "sdpa": CompressedCache(model, codec, keep_decoded=True)}
    tokens = prompt[None]
    same, most = 0, 0.0
    for step in range(steps + 1):
        logits = {}
        for name, cache in caches.items():
            model.set_attn_implementation(name)
            logits[name] = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
        one, other = (logits[name].logits[0, -1].float() for name in caches)
        if step:  # the first logits are those of the exact prompt
            same += int(one.argmax() == other.argmax())
            most = max(most, float((one - other).abs().max()))
        tokens = one.argmax().reshape(1, 1)
    return same, most


if __name__ == "__main__":
    main()
