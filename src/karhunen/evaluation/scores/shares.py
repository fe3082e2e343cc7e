"""Shares of right answers: an interval for one, and a test for two that answered the same questions.

    Wilson:   (k + z²/2 ± z √(k(n − k)/n + z²/4)) / (n + z²)
    McNemar:  of the b + c questions that one of two got right, b went one way: 2 · P(X ≤ min(b, c)), X ~ Bin(b + c, ½)

Source: Wilson (1927); McNemar (1947), in its exact form.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

from karhunen.evaluation.scores.metrics import LEVEL


def wilson(n_right: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a share; ValueError unless 0 ≤ n_right ≤ n and n > 0."""
    if not 0 <= n_right <= n or n < 1:
        raise ValueError(f"{n_right} of {n} is no share; give 0 to n right answers of 1 or more")
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle, half = n_right + z * z / 2, z * math.sqrt(n_right * (n - n_right) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> float:
    """How likely a split this uneven is if both are equally good; 1 where they got the same questions right. ValueError
    unless both answered the same number of questions."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} answers are not to the same questions")
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n
    return min(1.0, 2 * tail)
