"""The model's own text: as much as was asked for, the same at every call, kept on the way, of several kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.tiny import build
from tests.synthetic import quick
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from karhunen.calibration import own_samples as module
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.own_samples import PROMPTS, own_samples
from karhunen.recipes import make

CHAT = "begin {{ messages[0]['content'] }} answer"
BEGIN, ANSWER = 3, 4


def words(chat: bool = True) -> PreTrainedTokenizerFast:
    """A token per word, with or without a template."""
    known = sorted({word for prompt in PROMPTS for word in f"{prompt.ask} {prompt.opening}".split()})
    ids = {"end": 1, "begin": BEGIN, "answer": ANSWER, **{word: 5 + i % 90 for i, word in enumerate(known)}}
    made = Tokenizer(models.WordLevel(ids, unk_token="end"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="end", chat_template=CHAT if chat else None)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_TOKENS", 48)
    monkeypatch.setattr(module, "LEAST_NEW_TOKENS", 8)
    monkeypatch.setattr(module, "BATCH", 2)


@pytest.mark.parametrize("chat", [True, False])
def test_it_is_as_long_as_was_asked_and_begins_with_the_prompts(chat: bool) -> None:
    tokenizer = words(chat)
    found = own_samples(build("llama"), tokenizer, 110)
    assert [len(ids) for ids in found][:2] == [48, 48]
    assert sum(map(len, found)) == 110
    for ids, prompt in zip(found, PROMPTS, strict=False):
        asked = tokenizer(prompt.ask if chat else prompt.opening)["input_ids"]
        asked = [BEGIN, *asked, ANSWER] if chat else asked
        assert ids[: len(asked)].tolist() == asked[: len(ids)]


def test_a_longer_set_begins_as_a_shorter_one_and_other_seeds_give_other_text() -> None:
    model, tokenizer = build("llama"), words()
    few, many = own_samples(model, tokenizer, 96), own_samples(model, tokenizer, 192)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=False))
    assert not any(torch.equal(a, b) for a, b in zip(few, own_samples(model, tokenizer, 96, seed=1), strict=True))
    state = torch.random.get_rng_state()
    own_samples(model, tokenizer, 96)
    assert torch.equal(state, torch.random.get_rng_state()), "nobody else's random numbers are used"


def test_an_interrupted_call_goes_on_with_the_batches_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, told = build("llama"), words(), []
    whole = own_samples(model, tokenizer, 192)

    def stopping(done: int, total: int) -> None:
        told.append((done, total))
        if done >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own_samples(model, tokenizer, 192, folder=tmp_path, progress=stopping)
    assert told[0] == (0, 192)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    (kept,) = tmp_path.glob("own-samples-*.json")
    calls = []
    drawing = module.continued
    monkeypatch.setattr(module, "continued", lambda *a, **k: calls.append(a) or drawing(*a, **k))
    again = own_samples(model, tokenizer, 192, folder=tmp_path)
    assert len(calls) == 1, "the second batch alone was left"
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    kept.write_text("[[1, 2")
    assert torch.equal(own_samples(model, tokenizer, 96, folder=tmp_path)[0], whole[0]), "a damaged file is made again"


def test_statistics_of_text_and_own_samples_are_those_of_both() -> None:
    model, tokenizer, recipe = build("llama"), words(), quick(make("nova_kv"))
    text = torch.arange(300) % 90 + 3
    own = own_samples(model, tokenizer, 96)
    both = calibrate(model, [text, *own], recipe.needs(), min_tokens=16)
    apart = calibrate(model, [text], recipe.needs(), min_tokens=16) + calibrate(
        model, own, recipe.needs(), min_tokens=16
    )
    assert both.n_tokens == apart.n_tokens


def test_prompts_are_of_several_kinds_and_languages() -> None:
    assert {"novel", "Python", "manual", "conversation", "German", "Chinese"} <= {p.kind for p in PROMPTS}
    assert len({p.kind for p in PROMPTS}) == len({p.ask for p in PROMPTS}) == len(PROMPTS)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"n_tokens": 0}, "1 token or more"), ({"seed": -1}, "seed of 0"), ({"tokenizer": None}, "tokenizer")],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], said: str) -> None:
    settings = {"tokenizer": words(), "n_tokens": 96, **wrong}
    with pytest.raises(ValueError, match=said):
        own_samples(build("llama"), settings.pop("tokenizer"), settings.pop("n_tokens"), **settings)


def test_a_model_with_few_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has 20 positions"):
        own_samples(build("llama", max_position_embeddings=20), words(), 96)
