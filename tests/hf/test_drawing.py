"""Drawing by one number a row: the token whose share holds it, and texts that do not depend on their neighbours."""

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.tiny import build

from karhunen.hf.drawing import continued, drawn

P = torch.tensor([[0.0, 0.2, 0.3, 0.0, 0.5]])


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 1), (0.19, 1), (0.21, 2), (0.49, 2), (0.51, 4), (0.999, 4), (1 - 1e-16, 4)]
)
def test_a_number_falls_into_the_share_of_its_token(u: float, token: int) -> None:
    assert int(drawn(P, torch.tensor([u], dtype=torch.float64))) == token


def test_tokens_come_as_often_as_they_are_likely() -> None:
    n = 20_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = drawn(P.expand(n, -1), u).bincount(minlength=5) / n
    assert shares[0] == shares[3] == 0
    assert_near(shares, P[0], 0.02)  # three standard deviations of the largest count


def test_a_row_says_the_same_alone_and_beside_a_longer_one() -> None:
    model = build("llama")
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    both = continued(model, prompts, 12, [1, 2], pad=0)
    assert [len(text) for text in both] == [15, 18]
    assert [text[: len(p)] for text, p in zip(both, prompts, strict=True)] == prompts
    alone = [continued(model, [p], 12, [seed], pad=0)[0] for p, seed in zip(prompts, (1, 2), strict=True)]
    assert alone == both


def test_it_is_the_models_own_distribution() -> None:
    """Of many rows with one prompt, the first new token comes as often as the model says."""
    model, prompt = build("llama"), [5, 6, 7, 8]
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    wanted[model.config.eos_token_id] = 0
    wanted = wanted / wanted.sum()
    n = 4000
    texts = continued(model, [prompt] * n, 1, list(range(n)), pad=0)
    shares = torch.tensor([text[-1] for text in texts]).bincount(minlength=99) / n
    deviations = (shares - wanted) / (wanted * (1 - wanted) / n).sqrt().clamp_min(1e-4)
    assert float(deviations.abs().max()) < 5


def test_an_end_of_text_is_not_drawn_and_the_generation_settings_stay() -> None:
    model = build("llama", eos_token_id=4)
    before = model.generation_config.to_dict()
    (text,) = continued(model, [[5, 6]], 60, [3], pad=0)
    assert len(text) == 62
    assert 4 not in text
    assert model.generation_config.to_dict() == before
