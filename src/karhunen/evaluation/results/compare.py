"""Which of two is better where, with the interval of the difference.

Results are paired where model, task, inputs, seed and rate are the same. Where both have scores per token, the
difference is bootstrapped over the same tokens of both, which is far narrower than two intervals side by side.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from karhunen.device import HOST
from karhunen.evaluation.results.result import Result
from karhunen.evaluation.results.rows import bits_per_element
from karhunen.evaluation.scores.metrics import Interval, interval

MEASURES = {"kl": "lower", "agree": "higher", "nll_delta": "lower"}


@final
@dataclass(frozen=True)
class Difference:
    """B minus A of one measure on one task. `winner` is A or B where the interval excludes zero, else empty."""

    model: str
    task: str
    rate: int | None
    a: str
    b: str
    a_bits: float
    b_bits: float
    measure: str
    a_mean: float
    b_mean: float
    difference: Interval
    winner: str

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for `json.dumps`."""
        return asdict(self)


def compare(a: Sequence[Result], b: Sequence[Result]) -> list[Difference]:
    """All pairs; ValueError if nothing in A was measured on the same inputs as something in B."""
    theirs: dict[tuple[Any, ...], list[Result]] = {}
    for result in b:
        theirs.setdefault(_same_inputs(result), []).append(result)
    found: list[Difference] = []
    for mine in a:
        candidates = theirs.get(_same_inputs(mine), [])
        if not candidates:
            continue
        rate = mine["configuration"]["rate"]
        equal = [other for other in candidates if other["configuration"]["rate"] == rate]
        alike = [other for other in equal or candidates if _calibration(other) == _calibration(mine)]
        bits = bits_per_element(mine)
        other = min(alike or equal or candidates, key=lambda r: abs(bits_per_element(r) - bits))
        measures = [name for name in (*MEASURES, "score") if _has(mine, name) and _has(other, name)]
        found += [_difference(mine, other, name) for name in measures]
    if not found:
        raise ValueError(
            "nothing in A was measured on the same model, task, inputs and seed as something in B, or the dense model "
            "fails their task; "
            "evaluate both with the same arguments"
        )
    return found


def select(results: Sequence[Result], recipe: str) -> list[Result]:
    """Those of a recipe: by its text, its name, or a fingerprint's beginning; ValueError listing what there is."""
    ways = (
        lambda r: r["configuration"]["text"] == recipe and ":" in recipe,
        lambda r: r["configuration"]["recipe"] == recipe,
        lambda r: r["fingerprint"].startswith(recipe) and len(recipe) >= 6,
    )
    for way in ways:
        if chosen := [result for result in results if way(result)]:
            return chosen
    known = sorted({result["configuration"]["text"] for result in results})
    raise ValueError(f"no result of {recipe!r}; there are {', '.join(known)}")


def _calibration(result: Result) -> Any:
    return result["configuration"].get("calibration")


def _same_inputs(result: Result) -> tuple[Any, ...]:
    c = result["configuration"]
    return c["model"], c["weights_hash"], c["dtype"], c["task"]["name"], c["inputs"], c["seed"]


def _has(result: Result, measure: str) -> bool:
    """A task that the dense model fails says nothing, so its score is not compared."""
    if measure == "score":
        return bool(result.get("answers")) and result["metrics"]["conclusive"]
    return bool(result.get("tokens"))


def _values(result: Result, measure: str) -> list[Tensor]:
    if measure == "score":
        return [
            torch.tensor([float(answer["coded_score"])], dtype=torch.float64, device=HOST)
            for answer in result["answers"]
        ]
    return [torch.tensor(document[measure], dtype=torch.float64, device=HOST) for document in result["tokens"]]


def _difference(a: Result, b: Result, measure: str) -> Difference:
    mine, other = _values(a, measure), _values(b, measure)
    sizes = [[len(values) for values in side] for side in (mine, other)]
    if sizes[0] != sizes[1]:
        names = [result["configuration"]["text"] for result in (a, b)]
        raise ValueError(
            f"{names[0]} and {names[1]} were measured on the same inputs and hold {sum(sizes[0])} and {sum(sizes[1])} "
            f"scores of {measure}: one of them is damaged; evaluate it again"
        )
    difference = interval([y - x for x, y in zip(mine, other, strict=True)])
    sign = 1 if MEASURES.get(measure, "higher") == "lower" else -1
    winner = "" if not difference.excludes(0.0) else ("A" if sign * difference.mean > 0 else "B")
    configuration = a["configuration"]
    return Difference(
        configuration["model"],
        configuration["task"]["name"],
        configuration["rate"],
        configuration["text"],
        b["configuration"]["text"],
        bits_per_element(a),
        bits_per_element(b),
        measure,
        float(torch.cat(mine).mean()),
        float(torch.cat(other).mean()),
        difference,
        winner,
    )
