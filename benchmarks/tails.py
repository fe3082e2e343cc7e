"""What a mean hides: KL at 99 % and 99.9 %, the worst token and what stood before it, and when greedy text changes.

    recipes of this library and formats that engines use, at equal exact tokens: 4 sinks and 128 recent, or none at all

One stretch of prose, of code and of literature from the test documents; the prompt is read exactly, then coded. Codecs
are fitted once, for the usual window; without a window the same tables code all tokens. What the file holds is not
measured again.

    python benchmarks/tails.py --statistics FOLDER --tokens 1024 4096 --json results/measured/tails-smollm2.json
    python benchmarks/task_tables.py
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tasks import shapes_of

from karhunen.codec import Codec
from karhunen.evaluation.documents import default_documents
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.results.rates import rated
from karhunen.evaluation.scores.continuation import Prompt, dense_text, leaves_at, stop_tokens
from karhunen.evaluation.scores.metrics import interval, percentile, perplexity
from karhunen.evaluation.scores.score import DenseRun, run_dense, score
from karhunen.fitting import fit
from karhunen.hf.embedded import load
from karhunen.recipe import Recipe
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics
from karhunen.statistics.gathered import Statistics
from karhunen.windows.sink_recent import SinkRecent

WINDOW = (4, 128)
RECIPES: tuple[tuple[str, int | None], ...] = (
    ("karhunen", 4), ("karhunen", 8), ("q4_0", None), ("nvfp4", None), ("mxfp4", None), ("mlx", None),
    ("int4_per_token_head", None), ("q4_0:rotation=none", None), ("int4", None), ("spectra", 4), ("nova_kv", 4),
    ("turboquant_4bit", None), ("kivi", 4), ("spectra", 8), ("nova_kv", 8), ("kivi", 8), ("karhunen", 12),
    ("karhunen", 16), ("turboquant_3bit", None), ("q8_0", None), ("q8_0:rotation=none", None), ("fp8", None),
)  # fmt: skip
GENERATED_TOKENS = 32
CONTEXT_TOKENS = 24  # shown before the worst token


@dataclass(frozen=True)
class Read:
    """A document that the dense model has read, and its greedy continuation of the prompt."""

    run: DenseRun
    prompt: Prompt
    said: list[int]


def main() -> None:
    """Measure what is missing, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--statistics", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="lengths of the prompt")
    parser.add_argument(
        "--no-window", type=int, nargs="*", default=[1024], help="lengths measured without a window too"
    )
    parser.add_argument("--scored-tokens", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no row after so many")
    parser.add_argument("--json", type=Path, default=Path("results/measured/tails-smollm2.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    about = {"model": given.model, "scored_tokens": given.scored_tokens}
    rows = kept_rows(given.json, about)
    model, tokenizer = load(given.model)
    statistics: Statistics | None = None
    for n in given.tokens:
        wanted = [
            (text, recipe, window)
            for name, rate in RECIPES
            for text, recipe in [named(name, rate)]
            for window in ("4 + 128", *(("none",) if n in given.no_window else ()))
            if not any((r["tokens"], r["recipe"], r["window"]) == (n, text, window) for r in rows)
        ]
        reads = read(model, tokenizer, n, given.scored_tokens) if wanted else []
        for text, recipe, window in wanted:
            if time.perf_counter() - start > 60 * given.minutes:
                return
            if recipe.needs() and statistics is None:
                statistics = load_statistics(given.statistics)
            codec = coded(recipe, statistics, model, window)
            rows.append({"tokens": n, "recipe": text, "window": window, **row(model, tokenizer, codec, reads)})
            body = {**about, "generated_tokens": GENERATED_TOKENS, "made": asdict(provenance()), "rows": rows}
            given.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
            told = ", ".join(
                f"{key} {rows[-1][key]:.4g}" for key in ("coded_bits_per_element", "kl", "kl_p99", "worst")
            )
            print(f"{time.perf_counter() - start:5.0f} s  {n:5} tokens  {window:8} {text:28} {told}", flush=True)


def kept_rows(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """What the file holds; ValueError if it is of other documents."""
    if not path.is_file():
        return []
    held = json.loads(path.read_text(encoding="utf-8"))
    if any(held[name] != value for name, value in about.items()):
        raise ValueError(f"{path} holds rows of other documents than {about}; name another file")
    return held["rows"]


def named(name: str, rate: int | None) -> tuple[str, Recipe]:
    """A recipe with the usual window, and its text."""
    if rate is not None:
        (one,) = rated([name], (rate,), WINDOW)
        return f"{one.name}@{rate}", one.recipe
    recipe = make(name)
    return name, replace(recipe, window=SinkRecent(*WINDOW))


def coded(recipe: Recipe, statistics: Statistics | None, model: Any, window: str) -> Codec:
    """Fitted for the usual window; without one the same codec codes whatever comes."""
    codec = fit(recipe, statistics if recipe.needs() else shapes_of(model))
    if window != "none":
        return codec
    assert isinstance(codec.window, SinkRecent), "rows are of recipes whose window is sinks and recent tokens"
    return replace(codec, window=replace(codec.window, sink=0, recent=0))


def read(model: Any, tokenizer: Any, n: int, n_scored: int) -> list[Read]:
    """The test documents, read by the dense model."""
    sizes = {"prefill_tokens": n, "scored_tokens": n_scored}
    found: list[Read] = []
    for document in default_documents(tokenizer, "test", n_prose=1, n_code=1, n_literature=1, **sizes):
        run = run_dense(model, document)
        prompt = Prompt(document.tokens[:n], run.cache, int(document.tokens[n]))
        said = dense_text(model, prompt, GENERATED_TOKENS, stop_tokens(model, tokenizer))
        found.append(Read(run, prompt, said))
    return found


def row(model: Any, tokenizer: Any, codec: Codec, reads: list[Read]) -> dict[str, Any]:
    """All that is said of a codec on these documents."""
    scores = [score(model, codec, one.run) for one in reads]
    kl = [one.kl for one in scores]
    mean = interval(kl)
    worst = max(range(len(kl)), key=lambda i: float(kl[i].max()))
    return {
        "coded_bits_per_element": scores[0].report.total.coded_bits_per_element,
        "kl": mean.mean, "kl_low": mean.low, "kl_high": mean.high,
        "kl_p99": percentile(kl, 0.99), "kl_p999": percentile(kl, 0.999), "worst": float(kl[worst].max()),
        "worst_at": _shown(tokenizer, reads[worst].run, int(kl[worst].argmax())),
        "top1": float(torch.cat([one.agree for one in scores]).double().mean()),
        "perplexity_dense": perplexity([one.nll_dense for one in scores]),
        "perplexity": perplexity([one.nll_coded for one in scores]),
        "leaves_at": [leaves_at(model, codec, one.prompt, one.said) for one in reads],
        "commit": provenance().commit,
    }  # fmt: skip


def _shown(tokenizer: Any, run: DenseRun, at: int) -> dict[str, str]:
    """What stood before the token whose successor was predicted worst, and what the dense model expected."""
    document = run.document
    end = document.prefill_tokens + at + 1
    return {
        "document": document.name,
        "before": str(tokenizer.decode(document.tokens[end - CONTEXT_TOKENS : end].tolist())),
        "dense": str(tokenizer.decode([int(run.logits[at].argmax())])),
        "text": str(tokenizer.decode(document.tokens[end : end + 1].tolist())),
    }


if __name__ == "__main__":
    main()
