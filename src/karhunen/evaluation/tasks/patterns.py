"""Patterns that a text shows, and their next line: source code, copies, lists turned round, sums, JSON.

| kind       | the text                                 | a question                                                   |
|------------|------------------------------------------|--------------------------------------------------------------|
| code       | the source of a test module              | the lines after it, then the next one                        |
| copying    | prose                                    | 32 tokens of it, then the next three                         |
| lists      | lists of words and their reverse         | a new list                                                   |
| sums       | sums of one- and two-digit numbers       | a new sum                                                    |
| calls      | requests and calls as JSON, then prose   | a new request                                                |

Where a text shows examples, the older of them are what is coded: a codec that blurs them blurs the rule.
"""

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from karhunen.evaluation.documents import MODULES
from karhunen.evaluation.tasks.asked import Ask, Asked
from karhunen.evaluation.tasks.haystacks import FIRST, SECOND, length_of, paragraphs_from, prose_of

CITIES = ("Delft", "Rome", "Oslo", "Turin", "Ghent", "Paris", "Kyoto", "Quito", "Bergen", "Vienna", "Madrid", "Berlin")
N_CALLS = 6
N_WORDS = 3
N_GIVEN, N_COPIED, N_UNIQUE = 32, 3, 4


def code(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """Lines that follow a stretch of source code, each after the true ones before it; blank ones and comments are not
    asked for."""
    lines = _module(rng.choice(MODULES["test"]))
    end = start = rng.randrange(len(lines) // 2)
    n = 0
    while end < len(lines) and n < n_tokens:
        n += length_of(tokenizer, lines[end] + "\n")
        end += 1
    asks: list[Ask] = []
    for i in range(end, len(lines)):
        if len(asks) < n_asks and lines[i].strip() and not lines[i].strip().startswith("#"):
            asks.append(Ask("\n".join(lines[end - 1 : i]), lines[i], 24, before="\n"))
    if len(asks) < n_asks:
        raise ValueError(f"the module ends {len(asks)} lines after {n_tokens} tokens; {n_asks} lines are wanted")
    return Asked("\n".join(lines[start : end - 1]) + "\n", tuple(asks))


def copying(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """A passage that is begun again has to go on as it did; the end of what is given stands once in the
    text, within a sentence."""
    text = "\n".join(prose_of(tokenizer, n_tokens, paragraphs_from(rng)))
    ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    asks: list[Ask] = []
    for at in rng.sample(range(N_GIVEN, len(ids) - N_COPIED), len(ids) - N_COPIED - N_GIVEN):
        given, last, then = (
            str(tokenizer.decode(ids[a:b])) for a, b in ((at - N_GIVEN, at), (at - N_UNIQUE, at), (at, at + N_COPIED))
        )
        goes_on = given[-1].isalnum() and then[0] == " " and "\n" not in given + then
        if goes_on and text.count(last) == 1 and given + then in text:
            asks.append(Ask(f"\n\nAs was said above: {given.strip()}", then.strip(), N_COPIED))
        if len(asks) == n_asks:
            return Asked(text, tuple(asks))
    raise ValueError(f"a text of {n_tokens} tokens has {len(asks)} passages that stand once; {n_asks} are wanted")


def lists(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """Words in reverse order, after examples."""

    def example() -> tuple[str, str]:
        chosen = rng.sample([*FIRST, *SECOND], N_WORDS)
        return f"List: {', '.join(chosen)}\nReversed:", ", ".join(reversed(chosen))

    return _shown("Write each list in reverse order.", example, tokenizer, n_tokens, n_asks)


def sums(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """Two summands below ten, after examples."""

    def example() -> tuple[str, str]:
        a, b = rng.randrange(1, 10), rng.randrange(1, 10)
        return f"{a} + {b} =", str(a + b)

    return _shown("Sums:", example, tokenizer, n_tokens, n_asks)


def calls(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """The call that a request asks for; the form of a call stands before the prose only."""

    def example() -> tuple[str, str]:
        call = {"tool": "book", "city": rng.choice(CITIES), "seats": rng.randrange(2, 40)}
        return f"Request: book {call['seats']} seats in {call['city']}.\nCall:", json.dumps(call)

    shown = [example() for _ in range(N_CALLS)]
    head = "\n".join(["Each request becomes a call, as JSON.", *(f"{asked} {call}" for asked, call in shown)])
    left = n_tokens - length_of(tokenizer, head)
    if left < 1:
        raise ValueError(f"the examples alone take {n_tokens - left} tokens; ask for a text of more than {n_tokens}")
    text = "\n".join([head, "", *prose_of(tokenizer, left, paragraphs_from(rng))])
    return Asked(text, tuple(Ask(f"\n\n{asked}", call, 32) for asked, call in (example() for _ in range(n_asks))))


def same_call(answer: str, said: str) -> bool:
    """It parses, and holds the same names and values, whatever the order."""
    try:
        return bool(json.loads(said) == json.loads(answer))
    except ValueError:
        return False


def _shown(rule: str, example: Callable[[], tuple[str, str]], tokenizer: Any, n_tokens: int, n_asks: int) -> Asked:
    """Examples of `n_tokens` together, then new ones without their ends."""
    lines = [rule]
    n = length_of(tokenizer, rule)
    while n < n_tokens:
        asked, answer = example()
        lines.append(f"{asked} {answer}")
        n += length_of(tokenizer, f"{lines[-1]}\n")
    return Asked(
        "\n".join(lines), tuple(Ask(f"\n{asked}", answer) for asked, answer in (example() for _ in range(n_asks)))
    )


def _module(name: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"this Python comes without the source of its module {name}")
    return Path(spec.origin).read_text(encoding="utf-8").splitlines()
