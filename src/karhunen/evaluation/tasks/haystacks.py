"""Needles and the texts they are hidden in, at a length counted in tokens.

Source: RULER (arXiv:2404.06654) appendix B: sentences of the form «One of the special magic numbers for KEY is: VALUE.»
Here:   the essays are this project's evaluation text; keys are made of two short lists of words.
"""

import random
import textwrap
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from karhunen.calibration.texts import evaluation_text
from karhunen.evaluation.documents import prose

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LINE_CHARACTERS = 160
FIRST = (
    "amber", "ancient", "brave", "bright", "calm", "clever", "crisp", "curious", "eager", "early", "faint", "fierce",
    "gentle", "golden", "hollow", "humble", "ivory", "jolly", "keen", "late", "lively", "lone", "mellow", "misty",
    "narrow", "noble", "odd", "pale", "plain", "proud", "quick", "quiet", "rapid", "rough", "rustic", "sharp", "shy",
    "silent", "silver", "sly", "smooth", "solid", "spare", "stern", "still", "swift", "tame", "vivid", "warm", "wild",
)  # fmt: skip
SECOND = (
    "anchor", "arrow", "badger", "basin", "beacon", "bridge", "canyon", "castle", "cedar", "comet", "copper", "cradle",
    "delta", "ember", "falcon", "ferry", "field", "forest", "garden", "glacier", "hammer", "harbor", "island", "jacket",
    "kettle", "lantern", "ledger", "lizard", "magnet", "meadow", "mirror", "needle", "nettle", "orchard", "otter",
    "paddle", "pebble", "pepper", "pigeon", "quarry", "ribbon", "saddle", "sailor", "shadow", "temple", "timber",
    "tunnel", "valley", "violin", "willow",
)  # fmt: skip


def words(rng: random.Random, n: int) -> list[str]:
    """Different keys of two words."""
    pairs = rng.sample(range(len(FIRST) * len(SECOND)), n)
    return [f"{FIRST[i % len(FIRST)]}-{SECOND[i // len(FIRST)]}" for i in pairs]


def single_words(rng: random.Random, n: int) -> list[str]:
    """Different single words: those of the lists, then made-up ones."""
    known = [*FIRST, *SECOND]
    made = ("".join(rng.choice("bdfglmnprstvz") + rng.choice("aeiou") for _ in range(3)) for _ in range(10 * n))
    pool = list(dict.fromkeys([*rng.sample(known, len(known)), *made]))
    return pool[:n]


def values(rng: random.Random, kind: str, n: int) -> list[str]:
    """Numbers of seven digits, words or UUIDs."""
    if kind == "numbers":
        return [str(rng.randrange(1_000_000, 10_000_000)) for _ in range(n)]
    if kind == "uuids":
        return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(n)]
    return words(rng, n)


def needle(kind: str, key: str, value: str) -> str:
    """The sentence to be found."""
    return f"One of the special magic {kind} for {key} is: {value}."


def essay(rng: random.Random) -> list[str]:
    """Lines of the evaluation text, from a place of its own."""
    paragraphs = evaluation_text().split("\n\n")
    start = rng.randrange(len(paragraphs))
    turned = [*paragraphs[start:], *paragraphs[:start]]
    return [line for paragraph in turned for line in textwrap.wrap(" ".join(paragraph.split()), LINE_CHARACTERS)]


def paragraphs_from(rng: random.Random) -> list[str]:
    """Of the test prose, from a place of its own; one line each, the last to be taken first."""
    found = [" ".join(paragraph.split()) for paragraph in prose("test")]
    start = rng.randrange(len(found))
    return [*found[start:], *found[:start]][::-1]


def prose_of(tokenizer: Any, n_tokens: int, paragraphs: list[str]) -> list[str]:
    """Paragraphs of `n_tokens` together or a few more, taken from the end of `paragraphs`; ValueError if they end."""
    taken: list[str] = []
    n = 0
    while n < n_tokens:
        if not paragraphs:
            raise ValueError("the test prose ends before the text is long enough; ask for fewer tokens")
        taken.append(paragraphs.pop())
        n += length_of(tokenizer, taken[-1])
    return taken


def hide(units: Sequence[str], needles: Sequence[str], depths: Sequence[float], separator: str = "\n") -> str:
    """The needles among the units, each at its depth: 0 is the beginning, 1 the end."""
    places = sorted((round(depth * len(units)), i) for i, depth in enumerate(depths))
    parts: list[str] = []
    at = 0
    for place, i in places:
        parts += [*units[at:place], needles[i]]
        at = place
    return separator.join([*parts, *units[at:]])


def fill(tokenizer: Any, n_tokens: int, make: Callable[[int], str], n_most: int) -> str:
    """`make(n)` with the most units that keep the text within `n_tokens`; ValueError if one unit is too long."""
    low, high = 0, min(n_most, n_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length_of(tokenizer, make(middle)) <= n_tokens else (low, middle - 1)
    if low == 0:
        raise ValueError(f"{n_tokens} tokens are too few for this task: not one unit of its text fits")
    return make(low)


def length_of(tokenizer: Any, text: str) -> int:
    """In tokens, without special ones."""
    return len(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
