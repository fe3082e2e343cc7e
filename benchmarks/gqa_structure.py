"""Which structure of the key transform is right under grouped-query attention, on a model.

    python benchmarks/gqa_structure.py --model smollm2 --tokens 1024 --output results/measured

One forward gives each layer's keys after RoPE and each query head's queries, which
evaluation/scores/gqa_structure.py compares.
The transforms are judged on the moments they were made of: structures are compared, not how well one generalises.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from karhunen.calibration.texts import evaluation_text
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.gqa_structure import structures
from karhunen.hf.capture import Observation, capturing
from karhunen.statistics.moments import Moments

SINK = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--bits", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--output", type=Path, default=Path("results/measured"))
    given = parser.parse_args()

    from karhunen.hf.embedded import load

    model, tokenizer = load(given.model)
    tokens = tokenizer(evaluation_text()[: 8 * given.tokens], return_tensors="pt")["input_ids"][:, : given.tokens]
    rows: list[dict[str, object]] = []

    def listen(seen: Observation) -> None:
        if seen.attention is None or seen.attention.window_tokens is not None:
            return
        key, query = seen.key[0, :, SINK:].double(), seen.attention.query[0, :, SINK:].double() * seen.attention.scale
        h = key.shape[0]
        covariance = Moments.of(key).covariance
        metrics = Moments.of(query).second_moment.unflatten(0, (h, -1))
        rows.append({"layer": seen.layer, **{f"{b:g} bits": structures(covariance, metrics, b) for b in given.bits}})

    with capturing(model, listen) as run:
        run(tokens, None)
    summary = {}
    for b in given.bits:
        table = [row[f"{b:g} bits"] for row in rows]
        names = list(table[0])
        summary[f"{b:g} bits"] = {
            "median relative logit distortion": {n: median(t[n] for t in table) for n in names},
            "median ratio to per KV head": {n: median(t[n] / t["per KV head"] for t in table) for n in names},
            "layers where per KV head is best": sum(min(t, key=t.get) == "per KV head" for t in table),
            "layers": len(table),
        }
    body = {
        "what": "structure of the key transform under grouped-query attention",
        "model": given.model,
        "tokens": tokens.shape[1],
        "summary": summary,
        "layers": rows,
        "provenance": asdict(provenance()),
    }
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / f"gqa-{given.model}.json").write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        main()
