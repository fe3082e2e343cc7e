"""Leads of a given text are those of decoding it step by step; a guess changes no word, only how often is read."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.test_cache import codec_of, fitted, model_of, run, tokens

from karhunen.evaluation.scores.continuation import coded_text, dense_text, read_prompt
from karhunen.evaluation.scores.leads import leads, leads_of
from karhunen.hf.cache import CompressedCache, dense_cache


def test_the_lead_is_over_the_likeliest_other_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.5], [0.0, -1.0, 4.0]])
    assert leads_of(logits, torch.tensor([1, 0])).tolist() == [0.5, -4.0]


@pytest.mark.parametrize("name", ["int4", "kivi", "streaming_int4", "full", ""])
@pytest.mark.parametrize("n_prompt", [29, 33])
def test_a_text_read_at_once_has_the_leads_of_steps(name: str, n_prompt: int) -> None:
    """While it is read tokens leave the window, four at a time, and of `kivi` in blocks of 32."""
    model = model_of("llama")
    held: Any = CompressedCache(model, codec_of(model, name)) if name else dense_cache(model)
    text = tokens(1, 40, seed=4)[0]
    with torch.no_grad():
        before = run(model, tokens(1, n_prompt), held)[0, -1]
        steps, rows = deepcopy(held), [before]
        rows += [run(model, text[None, i : i + 1], steps)[0, -1] for i in range(len(text) - 1)]
    found, likeliest = leads(model, held, before, text)
    assert_near(found, leads_of(torch.stack(rows), text), 1e-4)  # float32 logits of two orders of summation
    assert likeliest.tolist() == torch.stack(rows).argmax(-1).tolist()
    assert held.get_seq_length() == n_prompt + len(text) - 1


@pytest.mark.parametrize("n_wrong", [0, 1, 9, 12])
def test_a_guess_right_or_wrong_gives_the_text_of_steps(n_wrong: int) -> None:
    model, codec = model_of("llama"), fitted("llama", "int4")
    prompt = read_prompt(model, tokens(1, 50)[0])
    plain, report = coded_text(model, codec, prompt, 12)
    guess = [*plain[: 12 - n_wrong], *[(t + 1) % 99 for t in plain[12 - n_wrong :]]]
    n_forwards, count = 0, model.register_forward_pre_hook(lambda *_: nonlocal_add())

    def nonlocal_add() -> None:
        nonlocal n_forwards
        n_forwards += 1

    said, guessed_report = coded_text(model, codec, prompt, 12, guess=guess)
    count.remove()
    assert said == plain
    assert guessed_report.to_dict()["bytes"] == report.to_dict()["bytes"]
    assert (n_forwards < 6) == (n_wrong == 0)
    assert len(dense_text(model, prompt, 12)) == 12
