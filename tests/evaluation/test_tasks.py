"""Questions with known answers: made from a seed, at the length asked for, scored by what is found."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evaluation.conftest import codec_of

from karhunen.evaluation.documents import SPLITS, Split, default_documents, file_documents
from karhunen.evaluation.tasks import make_tasks
from karhunen.evaluation.tasks.haystacks import hide
from karhunen.evaluation.tasks.kinds import Kind
from karhunen.evaluation.tasks.needles import Needles
from karhunen.evaluation.tasks.questions import PreparedQuestions, Question
from karhunen.evaluation.tasks.ruler import KINDS, Ruler
from karhunen.evaluation.tasks.texts import Texts
from karhunen.statistics.gathered import Statistics


class Words:
    """A tokenizer of white space: fast, and enough to count with."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    def decode(self, ids: list[str]) -> str:
        return "".join(f" {word}" for word in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_ruler_fills_its_length_and_holds_its_answers(kind: str) -> None:
    question = KINDS[kind](Words(), 1200, random.Random(0))
    n = len(question.prompt.split())
    assert 1000 <= n <= 1200
    for answer in question.answers:
        assert answer.lower() in question.prompt.lower()
    assert question.score("; ".join(question.answers)) == 1
    assert question.score("I do not know") == 0


@pytest.mark.parametrize("kind", ["niah_multikey_2", "vt", "cwe", "qa_2"])
def test_a_seed_decides_the_question(kind: str) -> None:
    first, again, other = (KINDS[kind](Words(), 600, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.prompt != other.prompt


def test_thirteen_kinds() -> None:
    assert len(KINDS) == 13


def test_a_task_of_several_answers_counts_the_share_that_is_found() -> None:
    question = Question("", "", ("alpha", "beta", "gamma", "delta"))
    assert question.score("Beta, then ALPHA.") == 0.5
    assert Question("", "", ("alpha", "beta"), all_answers=False).score("beta") == 1


def test_depth_zero_is_the_beginning_and_one_the_end() -> None:
    units = ["a", "b", "c", "d"]
    assert hide(units, ["N"], [0.0], " ") == "N a b c d"
    assert hide(units, ["N"], [0.5], " ") == "a b N c d"
    assert hide(units, ["N", "M"], [1.0, 0.25], " ") == "a M b c d N"


def test_the_word_that_is_counted_most_is_the_answer() -> None:
    question = KINDS["fwe"](Words(), 800, random.Random(3))
    listed = question.prompt.split("coded words. ")[1].split("\n")[0].split(" .... ")
    counts = sorted({word: listed.count(word) for word in listed}.items(), key=lambda pair: -pair[1])
    assert {word for word, _ in counts[:3]} == set(question.answers)


def test_too_short_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        KINDS["niah_single_2"](Words(), 20, random.Random(0))


def test_passages_come_from_a_file(tmp_path: Path) -> None:
    rows = [
        {"question": f"Who is {i}?", "answers": [f"N{i}"], "passages": [f"Number {i} is N{i}. " * 5]} for i in range(30)
    ]
    file = tmp_path / "qa.json"
    file.write_text(json.dumps(rows))
    task = Ruler("qa_1", n_tokens=200, n_questions=3, passages_file=str(file))
    assert task.name == "ruler qa_1 200"
    file.write_text(json.dumps([{"question": "?"}]))
    with pytest.raises(ValueError, match="passages"):
        task.prepare(torch.nn.Identity(), Words(), 0, None)
    with pytest.raises(ValueError, match="takes no passages"):
        Ruler("vt", passages_file="x")


def test_a_coded_prompt_is_asked_like_the_dense_one(loaded: tuple[Any, Any], statistics: Statistics) -> None:
    questions = [Question(f"What comes after {i}? " * 6, " It is", ("a", "b"), max_new_tokens=4) for i in range(2)]
    prepared = PreparedQuestions(*loaded, questions)
    full = prepared.measure(codec_of("full", statistics))
    assert [a["coded"] for a in full["answers"]] == [a["dense"] for a in full["answers"]]
    assert full["metrics"]["score"] == full["metrics"]["dense_score"]
    assert full["metrics"]["conclusive"] is False, "random weights answer nothing"
    coded = prepared.measure(codec_of("int2:group=12", statistics))
    assert coded["cache"]["coded_bits_per_element"] > 0
    assert [a["dense"] for a in coded["answers"]] == [a["dense"] for a in full["answers"]]


def test_needles_are_told_by_cell(loaded: tuple[Any, Any], statistics: Statistics) -> None:
    task = Needles(lengths=(600, 700), depths=(0.0, 1.0), n_each=1)
    body = task.prepare(*loaded, seed=0, limit=None).measure(codec_of("full", statistics))
    assert [(c["length"], c["depth"]) for c in body["needles"]] == [(600, 0.0), (600, 1.0), (700, 0.0), (700, 1.0)]
    assert all(cell["dense"] == cell["coded"] for cell in body["needles"])


def test_a_question_longer_than_the_model_is_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="positions"):
        Needles(lengths=(1024,), depths=(0.5,), n_each=1).prepare(*loaded, seed=0, limit=None)
    with pytest.raises(ValueError, match="positions"):
        Texts(prefill_tokens=1000, scored_tokens=100).prepare(*loaded, seed=0, limit=None)


def test_tasks_are_known_by_name(tmp_path: Path) -> None:
    assert make_tasks("texts", prefill_tokens=9) == (Texts(prefill_tokens=9),)
    assert make_tasks("texts@12,8", prefill_tokens=9) == (
        Texts(n_prose=12, n_code=8, n_literature=0, prefill_tokens=9),
    )
    names = {
        "texts": "texts:test", "texts:test@1,1,1": "texts:test", "texts@0,3": "texts:test@0,3,0",
        "texts:development": "texts:development", "texts:development@2,1,4": "texts:development@2,1,4",
    }  # fmt: skip
    assert {text: make_tasks(text)[0].name for text in names} == names
    assert make_tasks("ruler/vt@700") == (Ruler("vt", n_tokens=700),)
    assert [task.name for task in make_tasks("ruler@700")] == [f"ruler {kind} 700" for kind in KINDS]
    assert {task.kind for task in make_tasks("ruler")} <= set(KINDS) and make_tasks("ruler")
    assert make_tasks("documents") == (Kind("documents"),)
    assert make_tasks("chat@900,2000") == (Kind("chat", 900), Kind("chat", 2000))
    assert make_tasks("needles@500,900") == (Needles(lengths=(500, 900)),)
    file = tmp_path / "a.txt"
    file.write_text("words")
    assert make_tasks(str(file))[0].name == "text a.txt"
    with pytest.raises(ValueError, match="niah_single_1"):
        make_tasks("ruler/nothing")
    with pytest.raises(ValueError, match="number of tokens"):
        make_tasks("ruler/vt@long")
    for wrong in ("texts@", "texts@5", "texts@-1,2", "texts@a,1", "texts@²,1", "texts@1,1,1,1"):
        with pytest.raises(ValueError, match="of prose, of code and of literature"):
            make_tasks(wrong)
    with pytest.raises(ValueError, match="one at least"):
        make_tasks("texts@0,0")
    with pytest.raises(ValueError, match="there are 10 modules"):
        make_tasks("texts:development@0,11")
    with pytest.raises(ValueError, match="known: development, test"):
        make_tasks("texts:training")


@pytest.mark.parametrize("split", SPLITS)
def test_documents_are_of_the_length_and_kind_asked_for_and_not_of_the_calibration(
    loaded: tuple[Any, Any], split: Split
) -> None:
    from karhunen.calibration.texts import calibration_text

    counts = {"n_prose": 2, "n_code": 1, "n_literature": 0}
    found = default_documents(loaded[1], split, **counts, prefill_tokens=300, scored_tokens=40, seed=1)
    assert [document.name.split()[0] for document in found] == ["prose", "prose", "code"]
    used = set(calibration_text().split("\n\n"))
    for document in found:
        assert len(document.tokens) == 340
        text = loaded[1].decode(document.tokens.tolist())
        assert not used & set(text.split("\n\n")[:-1])
    with pytest.raises(ValueError, match="documents of code"):
        default_documents(loaded[1], split, **{**counts, "n_code": 99}, prefill_tokens=300, scored_tokens=40)


def test_a_file_is_cut_into_documents(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("word " * 100)
    found = file_documents(loaded[1], [file], prefill_tokens=80, scored_tokens=20)
    assert [len(document.tokens) for document in found] == [100] * 5
    with pytest.raises(ValueError, match="long enough"):
        file_documents(loaded[1], [file], prefill_tokens=800, scored_tokens=20)
