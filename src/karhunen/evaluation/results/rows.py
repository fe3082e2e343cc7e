"""One result as one row of a table: for the terminal, for Markdown, for the page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, final

from karhunen.evaluation.results.result import Result

COLUMNS: tuple[str, ...] = (
    "model", "task", "recipe", "bits/element", "× to 16 bit", "KL, nats", "KL 95 %", "top-1", "top-1 95 %",
    "ΔNLL", "output error", "ppl", "score", "dense",
)  # fmt: skip


@final
@dataclass(frozen=True)
class Row:
    """Figures of one result; the rate is that of `bits_per_element` below, the output error that of single layers
    (attention_error.py), their mean. What a task does not measure is None."""

    model: str
    task: str
    text: str
    recipe: str
    rate: int | None
    seed: int
    inputs: str
    bits_per_element: float
    ratio_to_16_bits: float
    kl: float | None
    kl_low: float | None
    kl_high: float | None
    top1: float | None
    top1_low: float | None
    top1_high: float | None
    nll_delta: float | None
    output_error: float | None
    perplexity: float | None
    score: float | None
    dense_score: float | None
    commit: str
    fingerprint: str

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of COLUMNS."""
        return (
            self.model,
            self.task,
            self.text,
            f"{self.bits_per_element:.3f}",
            f"{self.ratio_to_16_bits:.2f}",
            _nats(self.kl),
            _spread(_nats(self.kl_low), _nats(self.kl_high)),
            _figure(self.top1, 3),
            _spread(_figure(self.top1_low, 3), _figure(self.top1_high, 3)),
            _figure(self.nll_delta, 4),
            _figure(self.output_error, 4),
            _figure(self.perplexity, 3),
            _figure(self.score, 3),
            _figure(self.dense_score, 3),
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`."""
        return asdict(self)


def row_of(result: Result) -> Row:
    """The row of a result."""
    configuration, metrics = result["configuration"], result.get("metrics", {})
    kl, top1 = metrics.get("kl", {}), metrics.get("top1_agreement", {})
    bits = bits_per_element(result)
    return Row(
        model=configuration["model"],
        task=configuration["task"]["name"],
        text=configuration["text"],
        recipe=configuration["recipe"],
        rate=configuration["rate"],
        seed=configuration["seed"],
        inputs=configuration["inputs"],
        bits_per_element=bits,
        ratio_to_16_bits=16 / bits,
        kl=kl.get("mean"),
        kl_low=kl.get("low"),
        kl_high=kl.get("high"),
        top1=top1.get("mean"),
        top1_low=top1.get("low"),
        top1_high=top1.get("high"),
        nll_delta=metrics.get("nll_delta", {}).get("mean"),
        output_error=_mean([layer["output_error"] for layer in result.get("layers", [])]),
        perplexity=metrics.get("perplexity_coded"),
        score=metrics.get("score"),
        dense_score=metrics.get("dense_score"),
        commit=result["made"]["commit"] or "unknown",
        fingerprint=result["fingerprint"],
    )


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The rows of a table, tasks named so that rows of different inputs do not look alike."""
    names = task_names(results)
    return [replace(row_of(result), task=name) for result, name in zip(results, names, strict=True)]


def task_names(results: Sequence[Result]) -> list[str]:
    """The task of each result; with its inputs where a model was shown several under one name (seeds, lengths)."""
    seen: dict[tuple[str, str], set[str]] = {}
    for result in results:
        seen.setdefault(_shown(result), set()).add(result["configuration"]["inputs"])
    return [
        _shown(result)[1] + (f" #{result['configuration']['inputs'][:6]}" if len(seen[_shown(result)]) > 1 else "")
        for result in results
    ]


def _shown(result: Result) -> tuple[str, str]:
    return result["configuration"]["model"], result["configuration"]["task"]["name"]


def is_coded(result: Result) -> bool:
    """Whether any token of the cache was coded."""
    return result["cache"]["coded_bits_per_element"] > 0


def bits_per_element(result: Result) -> float:
    """Of coded tokens, where some are and none is dropped, the mean of all documents (`cache` is that of the first);
    tokens held exact beside their codes count with both.

    Else of the whole cache: 16 for one that codes nothing, and less by what is dropped. Exact scalars count 16 bits.
    """
    cache = result["cache"]
    accounts = [layer["account"] for layer in cache["layers"]]
    n_elements = sum(account["n_elements"] for account in accounts)
    if not n_elements:
        return 16.0
    bits = 8 * cache["bytes"]["dense"] / n_elements  # of an exact scalar
    n_exact = 8 * cache["bytes"]["exact_tokens"] / bits
    n_coded = sum(account["n_coded_elements"] for account in accounts)
    if is_coded(result) and n_coded + n_exact > 0.999 * n_elements:
        n_bytes = cache["bytes"]["codes"] + cache["bytes"]["scales_and_gains"]
        first = (8 * n_bytes + 16 * sum(map(_n_both, accounts))) / n_coded
        documents = [d["coded_bits_per_element"] for d in result.get("documents", []) if "coded_bits_per_element" in d]
        return first + (fmean(documents) - documents[0]) * 16 / bits if documents else first
    return (8 * (cache["bytes"]["codes"] + cache["bytes"]["scales_and_gains"]) + 16 * n_exact) / n_elements


def _n_both(account: Mapping[str, int]) -> float:
    """Scalars of one layer that are held exact beside their codes."""
    if not account["n_coded_elements"]:
        return 0.0
    exact = account["exact"] * account["n_elements"] / account["dense"]
    return max(0.0, exact + account["n_coded_elements"] - account["n_elements"])


def is_smaller(result: Result) -> bool:
    """Whether the cache holds less than the uncompressed one."""
    return bits_per_element(result) < 16


def markdown(rows: list[Row]) -> str:
    """A table for a README: one row per result, by task and rate, with the commit it was measured at."""
    wanted = [
        "model",
        "task",
        "recipe",
        "bits/element",
        "× to 16 bit",
        "KL, nats",
        "KL 95 %",
        "top-1",
        "top-1 95 %",
        "ΔNLL",
        "output error",
    ]
    if any(row.score is not None for row in rows):
        wanted += ["score", "dense"]
    head = [*wanted, "commit"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|" + "---:|" * (len(head) - 4) + "---|"]
    for row in sorted(rows, key=lambda row: (row.model, row.task, row.bits_per_element)):
        cells = dict(zip(COLUMNS, row.cells(), strict=True))
        lines.append("| " + " | ".join([*(cells[name] for name in wanted), f"`{row.commit}`"]) + " |")
    return "\n".join(lines)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _nats(value: float | None) -> str:
    return _figure(value, 4 if value is None or value >= 0.001 else 5)


def _spread(low: str, high: str) -> str:
    return f"{low} to {high}" if low and high else ""


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
