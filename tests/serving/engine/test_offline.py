"""vLLM itself, with and without a store: same answers, prefixes restored, nobody served another's pages."""

from pathlib import Path
from typing import Any

import pytest
from tests.serving.engine.models import FAMILIES, calibrated, save, tokens
from tests.serving.engine.offline import BLOCK, N_LONG, asked, run, transfer, twice, users

pytestmark = pytest.mark.timeout(1200)

RESTORED = (N_LONG - 1) // BLOCK * BLOCK
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of all engines, one after the other in one process; all of them share one store."""
    root = tmp_path_factory.mktemp("offline")
    store, engines = root / "store", []
    for family in FAMILIES:
        model, steps = save(family, root / family), twice() + users()
        codec = calibrated(model, root / f"{family}-codec")
        engines += [asked(f"{family} alone", model, steps), asked(family, model, steps, transfer(codec, store))]
    revision = save("llama", root / "llama-2", seed=1)
    own = calibrated(revision, root / "llama-2-codec")
    chat = [[tokens(300, 5)]]
    for n in (600, 900):
        chat.append([[*chat[-1][0], *tokens(n - len(chat[-1][0]), n)]])
    llama, codec = root / "llama", root / "llama-codec"
    engines += [
        asked("revision alone", revision, twice()),
        asked("revision", revision, twice(), transfer(own, store)),
        asked("chat alone", llama, chat),
        asked("chat", llama, chat, transfer(codec, store)),
        asked("wrong codec", revision, twice(), transfer(codec, store)),
        asked("wrong family", root / "qwen2", twice(), transfer(codec, store)),
        asked("no codec", llama, twice(), transfer(root, store)),
        asked("prefill", llama, [[tokens(N_LONG, 9)]], transfer(codec, root / "shared") | {"kv_role": "kv_producer"}),
        asked("decode", llama, [[tokens(N_LONG, 9)]], transfer(codec, root / "shared") | {"kv_role": "kv_consumer"}),
    ]
    return run(engines, 1100, root / "engines.log")


def texts(answer: dict[str, Any]) -> list[list[list[int]]]:
    assert "error" not in answer, answer["error"]
    return [[output["tokens"] for output in step] for step in answer["steps"]]


def cached(answer: dict[str, Any]) -> list[list[int]]:
    return [[output["cached"] for output in step] for step in answer["steps"]]


def assert_alike(answer: dict[str, Any], alone: dict[str, Any], at_least: float = 0.95) -> None:
    """Models with random weights find many tokens nearly as likely, so continuations part where another processor or
    another batch rounds otherwise; a wrong cache would show in every first token, and in most of the others."""
    assert "error" not in answer, answer["error"]
    pairs = [
        (output, other)
        for step, by_itself in zip(answer["steps"], alone["steps"], strict=True)
        for output, other in zip(step, by_itself, strict=True)
    ]
    equal = asked = 0
    for output, other in pairs:
        lengths = [i for i, (x, y) in enumerate(zip(output["tokens"], other["tokens"], strict=True)) if x != y]
        equal += (lengths or [16])[0]
        asked += min(16, (lengths or [16])[0] + 1)
        if not lengths:
            assert output["logprob"] == pytest.approx(other["logprob"], abs=0.5)
    assert all(output["tokens"][0] == other["tokens"][0] for output, other in pairs)
    assert equal / asked > at_least


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_unmodified_engine(answers: Answers, family: str) -> None:
    assert_alike(answers[family], answers[f"{family} alone"])


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_blocks_of_a_prompt_come_from_the_store(answers: Answers, family: str) -> None:
    first, second, one_user, other_users = cached(answers[family])
    assert (first, second, one_user) == ([0], [RESTORED], [0])
    assert other_users == [5 * BLOCK] * 9
    counts = answers[family]["metrics"]
    assert counts["pages_loaded"] == (RESTORED + 9 * 5 * BLOCK) // BLOCK
    assert counts["pages_saved"] == 2 * 5 and counts["bytes_saved"] > 0
    assert not any(counts[name] for name in ("refusals", "store_failures", "load_failures", "pages_dropped"))


def test_a_chat_reads_its_last_turn_only(answers: Answers) -> None:
    assert_alike(answers["chat"], answers["chat alone"], at_least=0.9)
    assert cached(answers["chat"]) == [[0], [2 * BLOCK], [4 * BLOCK]]


def test_two_revisions_of_a_model_do_not_meet_in_a_store(answers: Answers) -> None:
    assert cached(answers["revision"]) == [[0], [RESTORED]]
    assert_alike(answers["revision"], answers["revision alone"], at_least=0.9)
    assert texts(answers["revision"])[0] != texts(answers["llama"])[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong codec", "made for weights"),
        ("wrong family", "made for a llama"),
        ("no codec", "config.json"),
    ],
)
def test_what_does_not_fit_is_refused_at_start(answers: Answers, name: str, words: str) -> None:
    assert words in answers[name]["error"]


def test_one_engine_prefills_and_another_decodes(answers: Answers) -> None:
    """They share nothing but a store."""
    assert cached(answers["prefill"]) == [[0]] and cached(answers["decode"]) == [[RESTORED]]
    assert_alike(answers["decode"], answers["prefill"], at_least=0.9)
    assert answers["decode"]["metrics"]["pages_saved"] == 0


def test_the_stores_folder_holds_whole_pages_only(answers: Answers, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert answers["llama"]["metrics"]["pages_saved"] == 10
    folder = next(path for path in Path(tmp_path_factory.getbasetemp()).glob("offline*/store"))
    assert not list((folder / ".work").iterdir())
