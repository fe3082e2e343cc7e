"""Facts that a text holds, and questions that ask for them: pass keys, people in a document, what a user said first.

| kind      | the text                                             | a question                                   |
|-----------|------------------------------------------------------|----------------------------------------------|
| passkeys  | numbers of seven digits in prose, at even depths     | "The pass code of the north gate is"         |
| documents | sentences on who does what where, in prose           | "Question: Who is the mayor of Arlen?"       |
| chat      | a user's eight facts, then eight turns about prose   | "Where do I live?", in the chat's template   |

Prose is that of the test documents, cut to the length asked for; the seed decides where it begins.
"""

import random
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from karhunen.evaluation.tasks.asked import Ask, Asked
from karhunen.evaluation.tasks.haystacks import LINE_CHARACTERS, hide, length_of, paragraphs_from, prose_of, values

Make = Callable[[Any, int, int, random.Random], Asked]
"""Given a tokenizer, a number of tokens, a number of questions and a source of chance."""

WHO = (
    ("The mayor of {} is", "Who is the mayor of {}?"),
    ("The old mill near {} was built by", "Who built the old mill near {}?"),
    ("The museum in {} was founded by", "Who founded the museum in {}?"),
    ("The bread of {} is baked by", "Who bakes the bread of {}?"),
    ("The bridge at {} was designed by", "Who designed the bridge at {}?"),
    ("The clock in {} was repaired by", "Who repaired the clock in {}?"),
    ("The gardens of {} are kept by", "Who keeps the gardens of {}?"),
    ("The song of {} was written by", "Who wrote the song of {}?"),
    ("The ferry at {} is steered by", "Who steers the ferry at {}?"),
    ("The school in {} is led by", "Who leads the school in {}?"),
)
NUMBERED = (
    "The pass code of the north gate is", "The telephone number of Dr Harker is",
    "The serial number of the telescope is", "The invoice of the bakery has the number",
    "The licence plate of the red van is", "The account number of the library is",
    "The ticket to Bergen has the number", "The membership number of Mrs Lund is",
    "The combination of the safe is", "The patent for the steam pump has the number",
)  # fmt: skip
"""Unlike one another: of ten keys to ten doors a small model takes one for another without any compression."""
TOWNS = ("Arlen", "Brewick", "Calder", "Dunmore", "Eastvale", "Farrow", "Glenby", "Harwell", "Ilkley", "Jarrow")
FIRST_NAMES = ("Tomas", "Ada", "Iris", "Jon", "Lena", "Paul", "Rosa", "Sven", "Mira", "Owen", "Clara", "Hugo")
LAST_NAMES = ("Venn", "Marlow", "Kemp", "Harker", "Orr", "Wicks", "Delgado", "Lund", "Patel", "Price", "Stone", "Bell")
N_TURNS = 8
TOLD = (
    ("My name is {}.", "What is my name?", "Your name is", ("Harriet", "Wilfred", "Beatrix", "Edmund", "Sylvia")),
    ("I live in {}.", "Where do I live?", "You live in", ("Turin", "Bergen", "Quito", "Delft", "Kyoto")),
    ("I work as a {}.", "What is my job?", "You work as a", ("carpenter", "dentist", "geologist", "baker", "pilot")),
    ("My dog is called {}.", "What is my dog called?", "Your dog is called",
     ("Pepper", "Biscuit", "Nettle", "Comet", "Willow")),
    ("My favourite colour is {}.", "What is my favourite colour?", "Your favourite colour is",
     ("violet", "orange", "silver", "green", "yellow")),
    ("My locker number is {}.", "What is my locker number?", "Your locker number is",
     ("4821", "7315", "9064", "2578", "6193")),
    ("My sister is called {}.", "What is my sister called?", "Your sister is called",
     ("Marta", "Olive", "Ingrid", "Paula", "Greta")),
    ("I play the {}.", "Which instrument do I play?", "You play the", ("cello", "harp", "trumpet", "flute", "drums")),
)  # fmt: skip


def passkeys(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """Numbers at `n_asks` even depths."""
    if n_asks > len(NUMBERED):
        raise ValueError(f"{n_asks} questions to a text; there are {len(NUMBERED)} things with a number")
    told = list(zip(rng.sample(NUMBERED, n_asks), values(rng, "numbers", n_asks), strict=True))
    depths = [(i + 0.5) / n_asks for i in range(n_asks)]
    text = _around(tokenizer, n_tokens, [f"{thing} {number}." for thing, number in told], depths, rng)
    return Asked(
        text,
        tuple(
            Ask(f"\n\n{thing}", f"{number}.", 12, about={"depth": depth, "length": n_tokens})
            for (thing, number), depth in zip(told, depths, strict=True)
        ),
    )


def documents(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """Who does what where: every fact is of another kind and town, and every name has two words."""
    if n_asks > len(WHO):
        raise ValueError(f"{n_asks} questions to a document; there are facts for {len(WHO)}")
    firsts, lasts, towns = (rng.sample(known, n_asks) for known in (FIRST_NAMES, LAST_NAMES, TOWNS))
    told = [
        (stem.format(town), question.format(town), f"{first} {last}")
        for (stem, question), town, first, last in zip(rng.sample(WHO, n_asks), towns, firsts, lasts, strict=True)
    ]
    sentences = [f"{stem} {name}." for stem, _, name in told]
    text = _around(tokenizer, n_tokens, sentences, [(i + 0.5) / n_asks for i in range(n_asks)], rng)
    return Asked(text, tuple(Ask(f"\n\nQuestion: {asked}\nAnswer: {stem}", name) for stem, asked, name in told))


def chat(tokenizer: Any, n_tokens: int, n_asks: int, rng: random.Random) -> Asked:
    """A conversation whose first turn is asked about in its last; the answer's first words are given."""
    if n_asks > len(TOLD):
        raise ValueError(f"{n_asks} questions to a conversation; a user tells {len(TOLD)} facts")
    told = [(sentence, question, begun, rng.choice(known)) for sentence, question, begun, known in TOLD[:n_asks]]
    said = " ".join(sentence.format(value) for sentence, _, _, value in told)
    turns = [
        {"role": "user", "content": f"Hello. {said} Please remember all of this."},
        {"role": "assistant", "content": "Thank you. I will remember it."},
    ]
    shown = prose_of(tokenizer, n_tokens - length_of(tokenizer, said), paragraphs_from(rng))
    if len(shown) < N_TURNS - 1:
        raise ValueError(f"{n_tokens} tokens are {len(shown)} paragraphs, too few for {N_TURNS} turns; ask for more")
    for k in range(N_TURNS - 1):
        part = shown[k * len(shown) // (N_TURNS - 1) : (k + 1) * len(shown) // (N_TURNS - 1)]
        turns.append({"role": "user", "content": f"Please go on after: {part[0][:60]}"})
        turns.append({"role": "assistant", "content": "\n".join(part)})
    before = _template(tokenizer, turns, False)
    asks: list[Ask] = []
    for _, question, begun, value in told:
        whole = _template(tokenizer, [*turns, {"role": "user", "content": question}], True)
        if not whole.startswith(before):
            raise ValueError("this tokenizer's chat template rewrites earlier turns; questions cannot share them")
        asks.append(Ask(f"{whole.removeprefix(before)}{begun}", f"{value}.", 8))
    return Asked(before, tuple(asks))


def _template(tokenizer: Any, turns: Sequence[dict[str, str]], asks: bool) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        return "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns) + ("assistant: " if asks else "")
    return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=asks))


def _around(
    tokenizer: Any, n_tokens: int, sentences: Sequence[str], depths: Sequence[float], rng: random.Random
) -> str:
    """The sentences as lines of their own between lines of prose, `n_tokens` together or a paragraph more."""
    held = sum(length_of(tokenizer, sentence) for sentence in sentences)
    if held >= n_tokens:
        raise ValueError(f"the facts alone take {held} tokens; ask for a text of more than {n_tokens}")
    paragraphs = prose_of(tokenizer, n_tokens - held, paragraphs_from(rng))
    return hide([line for one in paragraphs for line in textwrap.wrap(one, LINE_CHARACTERS)], sentences, depths)
