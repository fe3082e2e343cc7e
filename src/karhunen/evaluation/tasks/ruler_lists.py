"""RULER's other tasks: variables that pass on a value, words to count, passages to read.

Source: RULER (arXiv:2404.06654), appendix B and its templates: 4 hops; common words 30 times, others 3 times; coded
words with frequencies by Zipf's law of exponent 2.
"""

import json
import random
import string
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from karhunen.evaluation.tasks.haystacks import NOISE, fill, hide, single_words
from karhunen.evaluation.tasks.questions import Question

N_HOPS = 4
N_COMMON, TIMES_COMMON, TIMES_OTHER = 10, 30, 3
ZIPF_EXPONENT = 2.0
QA_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
TOWNS = ("Arlen", "Brewick", "Calder", "Dunmore", "Eastvale", "Farrow", "Glenby", "Harwell", "Ilkley", "Jarrow")
TRADES = ("baker", "carpenter", "dentist", "engineer", "farmer", "geologist", "harpist", "judge", "mason", "pilot")


def tracked_variables(tokenizer: Any, n_tokens: int, rng: random.Random) -> Question:
    """Which variables have this value?"""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(N_HOPS + 1)]
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(names))]
    depths = sorted(rng.random() for _ in chain)

    def make(n: int) -> str:
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{hide([NOISE] * n, chain, depths)}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above."
        )

    beginning = (
        f" Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
        f"assigned the value {value}, they are:"
    )
    return Question(fill(tokenizer, n_tokens, make, n_tokens), beginning, tuple(names), max_new_tokens=40)


def common_words(tokenizer: Any, n_tokens: int, rng: random.Random) -> Question:
    """Which ten words of the list are the commonest?"""
    pool = single_words(rng, N_COMMON + n_tokens // TIMES_OTHER)
    common, others = pool[:N_COMMON], pool[N_COMMON:]
    times = max(2 * TIMES_OTHER, min(TIMES_COMMON, n_tokens // 50))
    seed = rng.random()

    def make(n: int) -> str:
        listed = common * times + others[: n - 1] * TIMES_OTHER
        random.Random(seed).shuffle(listed)
        text = " ".join(f"{i + 1}. {word}" for i, word in enumerate(listed))
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{text}\nQuestion: What are the {N_COMMON} most common words in the above list?"
        )

    beginning = f" Answer: The top {N_COMMON} words that appear most often in the list are:"
    return Question(fill(tokenizer, n_tokens, make, len(others)), beginning, tuple(common), max_new_tokens=80)


def frequent_words(tokenizer: Any, n_tokens: int, rng: random.Random) -> Question:
    """Which three coded words are the most frequent? Dots stand between words, as noise."""
    coded = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(200)]
    seed = rng.random()

    def make(n: int) -> str:
        weight = sum(rank**-ZIPF_EXPONENT for rank in range(1, len(coded) + 1))
        text = [w for rank, w in enumerate(coded, 1) for _ in range(round(n * rank**-ZIPF_EXPONENT / weight))]
        random.Random(seed).shuffle(text)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' .... '.join(text)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text?"
        )

    beginning = " Answer: According to the coded text above, the three most frequently appeared words are:"
    return Question(fill(tokenizer, n_tokens, make, n_tokens), beginning, tuple(coded[:3]), max_new_tokens=40)


def passages(n_hops: int, file: Path | None = None) -> Callable[[Any, int, random.Random], Question]:
    """Questions on passages, made up or given; other passages stand in the way."""

    def make_question(tokenizer: Any, n_tokens: int, rng: random.Random) -> Question:
        question, answers, needed, others = _given(file, rng) if file else _made_up(n_hops, rng)
        depths = [rng.random() for _ in needed]

        def make(n: int) -> str:
            text = hide(others[:n], needed, depths, separator="\0").split("\0")
            shown = "\n\n".join(f"Document {i + 1}:\n{passage}" for i, passage in enumerate(text))
            return f"{QA_TASK}\n\nThe following are given documents.\n\n{shown}\n\n{QA_TASK}\n\nQuestion: {question}"

        text = fill(tokenizer, n_tokens, make, len(others))
        return Question(text, " Answer:", answers, all_answers=False, max_new_tokens=24)

    return make_question


def _made_up(n_hops: int, rng: random.Random) -> tuple[str, tuple[str, ...], list[str], list[str]]:
    names = [name.capitalize() for name in single_words(rng, 1200)]
    people = list(zip(names[::2], names[1::2], strict=True))
    lives = [rng.choice(TOWNS) for _ in people]
    told = [
        f"{first} {last} is a {rng.choice(TRADES)}. {first} was born in the spring and moved to {town} after school."
        for (first, last), town in zip(people, lives, strict=True)
    ]
    (first, last), (sister, _) = people[0], people[1]
    if n_hops == 1:
        return f"To which town did {first} {last} move after school?", (lives[0],), told[:1], told[1:]
    link = f"{first} {last} has one sister, whose name is {sister} {people[1][1]}. They write to each other every week."
    question = f"To which town did the sister of {first} {last} move after school?"
    return question, (lives[1],), [link, told[1]], told[2:]


def _given(file: Path, rng: random.Random) -> tuple[str, tuple[str, ...], list[str], list[str]]:
    rows = cast("list[dict[str, Any]]", json.loads(file.read_text(encoding="utf-8")))
    if not rows or any(not row.keys() >= {"question", "answers", "passages"} for row in rows):
        raise ValueError(f"{file} is no list of objects with `question`, `answers` and `passages`")
    chosen = rng.choice(rows)
    others = [p for row in rows if row is not chosen for p in row["passages"] if p not in chosen["passages"]]
    rng.shuffle(others)
    return chosen["question"], tuple(chosen["answers"]), list(chosen["passages"]), others
