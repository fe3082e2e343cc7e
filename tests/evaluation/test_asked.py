"""Questions that share a text: what is asked, what is right, and that a branch answers like a cache of its own."""

import json
import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evaluation.conftest import codec_of
from tests.evaluation.test_tasks import Words

from karhunen.evaluation.scores.continuation import dense_text, read_prompt
from karhunen.evaluation.scores.shares import mcnemar, wilson
from karhunen.evaluation.tasks.asked import Ask, Asked, PreparedAsked, metrics_of, same_line, says
from karhunen.evaluation.tasks.kinds import KINDS, Kind
from karhunen.evaluation.tasks.patterns import same_call
from karhunen.statistics.gathered import Statistics

TEXT = "The mill was built by Ada. " * 9


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_fills_its_length_and_its_answers_are_right(kind: str) -> None:
    make, right = KINDS[kind]
    asked = make(Words(), 600, 8, random.Random(0))
    assert 560 <= len(asked.text.split()) <= 800
    assert len(asked.asks) == 8
    for ask in asked.asks:
        assert right(ask.answer, ask.answer.strip())
        assert not right(ask.answer, "I do not know")
    assert asked == make(Words(), 600, 8, random.Random(0))
    assert asked.text != make(Words(), 600, 8, random.Random(1)).text


@pytest.mark.parametrize("kind", ["passkeys", "documents", "chat", "copying"])
def test_what_is_asked_for_stands_in_the_text(kind: str) -> None:
    asked = KINDS[kind][0](Words(), 600, 8, random.Random(2))
    for ask in asked.asks:
        assert ask.answer in asked.text


def test_passkeys_lie_at_their_depths() -> None:
    asked = KINDS["passkeys"][0](Words(), 2000, 10, random.Random(0))
    for ask in asked.asks:
        assert asked.text.index(ask.answer) / len(asked.text) == pytest.approx(ask.about["depth"], abs=0.1)


def test_calls_are_compared_as_values() -> None:
    call = json.dumps({"tool": "book", "seats": 3})
    assert same_call(call, '{"seats":3, "tool":"book"}')
    assert not same_call(call, '{"tool": "book", "seats": 4}') and not same_call(call, '{"tool": "book", "seats": 3')


def test_more_questions_than_facts_are_refused() -> None:
    for kind, n in (("documents", 11), ("chat", 9), ("passkeys", 11)):
        with pytest.raises(ValueError, match=f"{n} questions"):
            KINDS[kind][0](Words(), 600, n, random.Random(0))
    with pytest.raises(ValueError, match="the facts alone take"):
        KINDS["passkeys"][0](Words(), 40, 10, random.Random(0))
    with pytest.raises(ValueError, match="unknown kind 'riddles'"):
        Kind("riddles")
    with pytest.raises(ValueError, match="n_each=0"):
        Kind("sums", n_each=0)


def prepared(loaded: tuple[Any, Any], answer: str = "Ada.") -> PreparedAsked:
    asks = tuple(Ask(f" {who} asked: who built it? It was", answer, 12) for who in ("Mira", "Owen"))
    return PreparedAsked(*loaded, [Asked(TEXT, asks)], says)


def test_the_dense_answer_is_greedy_decoding_of_text_and_question(loaded: tuple[Any, Any]) -> None:
    made = prepared(loaded)
    whole = torch.cat([made.texts[0], made.questions[0][0]])
    expected = dense_text(loaded[0], read_prompt(loaded[0], whole), 12)
    said = made._dense(0)[1][0]
    assert said == expected[: len(said)] and (len(said) == 12 or made._ended(said))


def test_a_guess_changes_no_answer(loaded: tuple[Any, Any], statistics: Statistics) -> None:
    first = prepared(loaded).measure(codec_of("int4:group=12", statistics))
    right = first["answers"][0]["coded"] or "Ada."
    for guess in (right, f"{right[: len(right) // 2]}zebra", "zebra"):
        again = prepared(loaded, guess).measure(codec_of("int4:group=12", statistics))
        assert [a["coded"] for a in again["answers"]] == [a["coded"] for a in first["answers"]]
        assert [a["dense"] for a in again["answers"]] == [a["dense"] for a in first["answers"]]


@pytest.mark.parametrize("name", ["full", "int4:group=12", "int2:group=12", "snapkv:kept=48"])
def test_a_branch_answers_like_a_cache_of_its_own(loaded: tuple[Any, Any], statistics: Statistics, name: str) -> None:
    codec, made = codec_of(name, statistics), prepared(loaded)
    dense, _ = made._dense(0)
    found = made.measure(codec)
    alone = [
        PreparedAsked(*loaded, [Asked(TEXT, (ask,))], says).measure(codec)["answers"][0] for ask in made.asked[0].asks
    ]
    assert [a["coded"] for a in found["answers"]] == [a["coded"] for a in alone]
    if name == "full":
        assert found["metrics"]["same"] == found["metrics"]["similarity"] == 1
        assert [a["coded"] for a in found["answers"]] == [a["dense"] for a in found["answers"]]
    assert dense.get_seq_length() == len(made.texts[0]), "no question changes what the dense model has read"


def test_what_is_kept_in_a_folder_is_what_was_made(
    loaded: tuple[Any, Any], statistics: Statistics, tmp_path: Path
) -> None:
    codec, results = codec_of("int4:group=12", statistics), []
    for _ in range(2):
        made = prepared(loaded)
        made.keep_in(tmp_path)
        results.append(made.measure(codec))
    assert results[0] == results[1] == prepared(loaded).measure(codec)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("*.json"))) == 1
    (file,) = tmp_path.glob("*.json")
    file.write_text(json.dumps([[7], [7]]))
    made = prepared(loaded)
    made.keep_in(tmp_path)
    assert made._dense(0)[1] == [[7], [7]], "answers are read, not made again"


def test_a_text_longer_than_the_model_is_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="positions"):
        PreparedAsked(*loaded, [Asked(TEXT * 9, (Ask("?", "!"),))], says)


def test_shares_of_answers() -> None:
    answers = [
        {"coded_score": c, "dense_score": d, "same": c == d, "similarity": 0.5}
        for c, d in ((True, True), (False, True), (True, True), (True, True))
    ]
    found = metrics_of(answers)
    assert (found["score"], found["dense_score"], found["same"], found["similarity"]) == (0.75, 1.0, 0.75, 0.5)
    assert found["conclusive"] and found["n_questions"] == 4
    assert same_line(" a b ", "a b") and not same_line("a b", "a  b")


def test_wilsons_interval_is_where_the_score_test_rejects() -> None:
    low, high = wilson(81, 100)
    for end in (low, high):
        assert abs(0.81 - end) / math.sqrt(end * (1 - end) / 100) == pytest.approx(1.959964, abs=1e-5)
    assert (wilson(0, 10)[0], wilson(10, 10)[1]) == pytest.approx((0, 1), abs=1e-12)
    with pytest.raises(ValueError, match="11 of 10"):
        wilson(11, 10)


def test_mcnemar_is_the_share_of_coin_flips_that_uneven() -> None:
    a = [True] * 7 + [False] * 2 + [True] * 20
    b = [False] * 7 + [True] * 2 + [True] * 20
    flips = [sum(flip) for flip in product((0, 1), repeat=9)]
    assert mcnemar(a, b) == pytest.approx(sum(min(k, 9 - k) <= 2 for k in flips) / len(flips))
    assert mcnemar(a, a) == 1
    with pytest.raises(ValueError, match="same questions"):
        mcnemar(a, b[1:])
