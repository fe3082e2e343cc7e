"""What is computed from scored tokens: means with intervals, tails, agreement of texts.

    interval: the 2.5th and 97.5th percentile of the mean over resampled units (bootstrap)

Units are documents where there are many, else runs of BLOCK_TOKENS neighbouring tokens: neighbours share their errors,
so single tokens would make the interval too narrow. Source: Künsch (1989), the block bootstrap; Lin (2004), ROUGE-L.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Shaped
from torch import Tensor

from karhunen.device import HOST

BLOCK_TOKENS = 32
MANY_DOCUMENTS = 20
N_RESAMPLES = 2000
LEVEL = 0.95


@final
@dataclass(frozen=True)
class Interval:
    """A mean over tokens and its interval; `unit` says what was resampled, `n_units` how many there are."""

    mean: float
    low: float
    high: float
    unit: str
    n_units: int

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside."""
        return not self.low <= value <= self.high


def interval(documents: Sequence[Shaped[Tensor, " _"]], seed: int = 0) -> Interval:
    """Mean over all tokens of all documents, with its bootstrap interval."""
    unit, parts = _units([values.double() for values in documents])
    sums = torch.stack([part.sum() for part in parts])
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64, device=sums.device)
    generator = torch.Generator(HOST).manual_seed(seed)
    drawn = torch.randint(len(parts), (N_RESAMPLES, len(parts)), generator=generator, device=HOST).to(sums.device)
    means = sums[drawn].sum(-1) / counts[drawn].sum(-1)
    tail = (1 - LEVEL) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64, device=means.device)).tolist()
    return Interval(float(sums.sum() / counts.sum()), low, high, unit, len(parts))


def percentile(documents: Sequence[Shaped[Tensor, " _"]], share: float) -> float:
    """The value that `share` of all tokens do not exceed."""
    return float(torch.cat([values.double() for values in documents]).quantile(share))


def perplexity(documents: Sequence[Shaped[Tensor, " _"]]) -> float:
    """exp of the mean negative log-likelihood."""
    return float(torch.cat([values.double() for values in documents]).mean().exp())


def rouge_l(reference: Sequence[int], candidate: Sequence[int]) -> float:
    """F1 of the longest common subsequence; 1 for equal texts, also for two empty ones."""
    if not reference and not candidate:
        return 1.0
    row = [0] * (len(candidate) + 1)
    for expected in reference:
        previous = 0
        for j, given in enumerate(candidate, start=1):
            above = row[j]
            row[j] = previous + 1 if expected == given else max(above, row[j - 1])
            previous = above
    return 2 * row[-1] / (len(reference) + len(candidate))


def tokens_until_divergence(reference: Sequence[int], candidate: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    pairs = enumerate(zip(reference, candidate, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(reference), len(candidate)))


def _units(documents: list[Tensor]) -> tuple[str, list[Tensor]]:
    if not any(len(values) for values in documents):
        raise ValueError("there is no scored token to take a mean of")
    if len(documents) >= MANY_DOCUMENTS:
        return "documents", [values for values in documents if len(values)]
    blocks = [block for values in documents if len(values) for block in values.split(BLOCK_TOKENS)]
    return f"blocks of {BLOCK_TOKENS} tokens", blocks
