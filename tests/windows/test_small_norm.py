"""Tokens of small norm stay exact, and a steady rule keeps as many as the budget has set aside, whatever the text."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from tests.hf.tiny import build
from tests.synthetic import SMALL, cached, statistics
from torch import Tensor

from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.texts import calibration_text
from karhunen.codec import LayerCodec
from karhunen.evaluation.documents import prose
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.probe import cache_argument
from karhunen.recipes import make
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS
from karhunen.store.layer_store import LayerStore
from karhunen.windows.sink_recent import SinkRecent
from karhunen.windows.small_norm import TOKENS_ABOVE, TOKENS_BELOW, NormBelow, SmallNorm

WINDOW = SinkRecent(sink=2, recent=10, page_tokens=8)


def text(short: float, t: int = 2000, b: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values, of which the share `short` are abnormally short."""
    key, value = cached(SMALL, b, t, seed)
    few = torch.rand(b, t, generator=torch.Generator().manual_seed(seed)) < short
    return key, torch.where(few[:, None, :, None], 1e-3 * value, value)


def layer(share: float | None) -> LayerCodec:
    recipe = make("karhunen:bits=2")
    made = fit(recipe, statistics(recipe, SMALL)).layers[0]
    assert made.exceptions is not None
    return replace(made, exceptions=replace(made.exceptions, share=share))


def kept(store: LayerStore) -> list[list[int]]:
    found = store.exceptions
    assert found is not None
    return [found.tokens[found.rows == row].sort()[0].tolist() for row in range(int(found.rows.max()) + 1)]


@pytest.mark.parametrize("short", [0.0, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.03])
def test_the_share_kept_exact_is_the_one_asked_for_at_every_length(short: float, share: float) -> None:
    rule = NormBelow("value", 1.0, share)
    exact = rule.exact(*text(short), 16)[0]
    n = torch.arange(16, 2001, 16)
    off = exact.cumsum(0)[n - 1] - share * n.double()
    assert off.min() >= -TOKENS_BELOW - 1e-9
    assert off.max() <= TOKENS_ABOVE + 1e-9


def test_without_a_share_every_short_token_is_kept_and_no_other() -> None:
    key, value = text(0.1)
    exact = NormBelow("value", 1.0).exact(key, value, 16)
    assert torch.equal(exact, value.abs().amax((1, 3)) < 0.1)


def test_of_a_group_the_shortest_are_kept() -> None:
    value = torch.ones(1, 1, 16, 1)
    value[0, 0, [3, 9, 12], 0] = torch.tensor([0.3, 0.1, 0.2])
    exact = NormBelow("value", 0.5, 0.0).exact(value, value, 16, kept_before=torch.tensor([TOKENS_ABOVE - 2]))
    assert exact[0].nonzero()[:, 0].tolist() == [9, 12]


@pytest.mark.parametrize("step", [1, 7, 64, 700])
def test_which_tokens_are_kept_does_not_depend_on_how_many_come_at_a_time(step: int) -> None:
    key, value = text(0.2, t=700, b=2)
    key[:, :, 300:400], value[:, :, 300:400] = key[:, :, 200:300], value[:, :, 200:300]  # equal tokens, equal norms
    at_once, in_steps = (LayerStore(layer(0.05), WINDOW) for _ in range(2))
    at_once.append(key, value)
    for start in range(0, 700, step):
        in_steps.append(key[:, :, start : start + step], value[:, :, start : start + step])
    assert kept(at_once) == kept(in_steps)
    assert len(kept(at_once)[0]) == pytest.approx(0.05 * at_once.n_coded, abs=TOKENS_ABOVE)
    for slot in SLOTS:
        one, other = at_once.packed(slot), in_steps.packed(slot)
        assert one is not None and other is not None
        assert torch.equal(one.planes, other.planes)


def test_each_row_of_a_batch_keeps_what_it_keeps_alone() -> None:
    key, value = text(0.1, t=600, b=3)
    together = LayerStore(layer(0.02), WINDOW)
    together.append(key, value)
    together.select(torch.tensor([2, 0]))
    key, value = key[[2, 0]], value[[2, 0]]
    more_key, more_value = text(0.1, t=100, b=2, seed=5)
    together.append(more_key, more_value)
    key, value = torch.cat([key, more_key], 2), torch.cat([value, more_value], 2)
    for row, mine in enumerate(kept(together)):
        alone = LayerStore(layer(0.02), WINDOW)
        alone.append(key[row : row + 1], value[row : row + 1])
        assert kept(alone) == [mine]


def test_texts_with_none_and_with_many_short_tokens_take_the_bits_asked_for() -> None:
    """As near as whole bytes come, 8 bits of 128 elements, and the slack, 16 bits of each of its tokens' numbers."""
    recipe = make("karhunen:bits=2")
    seen = statistics(recipe, SMALL)
    count = float(seen.layers[0].get(recipe.about("key"), Moments).count.max())
    rare = replace(seen, layers={0: replace(seen.layers[0], n_tokens=round(count / 0.99))})
    made = fit(recipe, rare)
    for short in (0.0, 0.01, 0.05):
        store = LayerStore(made.layers[0], made.window)
        key, value = text(short, t=4000)
        store.append(key.bfloat16(), value.bfloat16())
        near = 8 / 128 + 16 * TOKENS_ABOVE / store.n_coded
        assert store.account().coded_bits_per_element == pytest.approx(2, abs=near)


def test_padding_takes_nothing_of_what_is_set_aside_for_the_text() -> None:
    key, value = text(0.1, t=160)
    rule = NormBelow("value", 1.0, 0.1)
    padded = torch.arange(160)[None] < 80
    value[:, :, :80] = 0.0
    exact = rule.exact(key, value, 16, padding=padded)
    short = value[:, :, 80:].abs().amax((1, 3)) < 0.1
    assert exact[:, 80:][short].sum() == short.sum() > 0


@pytest.mark.slow
def test_a_family_with_key_biases_takes_the_bits_asked_for_on_texts_it_has_not_seen() -> None:
    """Shaped like Qwen2: key biases as large as keys, two letters without values. 1 % on the mean, 3 % on each."""
    generator = torch.Generator().manual_seed(1)
    model = build(
        "qwen2", vocab_size=256, max_position_embeddings=4096, hidden_size=256, intermediate_size=256,
        num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    )  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.bias.copy_(2 * torch.randn(attention.k_proj.bias.shape, generator=generator))
            attention.v_proj.bias.zero_()
            for letter in b"\n.":
                axis = torch.nn.functional.normalize(model.model.embed_tokens.weight[letter], dim=0)
                attention.v_proj.weight -= (attention.v_proj.weight @ axis)[:, None] * axis
    model = model.bfloat16()
    recipe = make("karhunen:bits=2")
    seen = torch.tensor(list(calibration_text().encode()[: 8 * 2048])).reshape(8, 2048)
    codec = fit(recipe, calibrate(model, seen, recipe.needs(), max_tokens=seen.numel()))
    modules = [importlib.util.find_spec(name) for name in ("typing", "pickle")]
    code = [Path(spec.origin).read_text() for spec in modules if spec and spec.origin]
    rates: list[float] = []
    for unseen in ("\n\n".join(prose("test")), *code, "no line ends here and no stop " * 100):
        cache = CompressedCache(model, codec)
        tokens = torch.tensor([list(unseen.encode()[:2048])])
        with torch.no_grad():
            model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache})
        rates.append(cache.report().total.coded_bits_per_element)
    assert rates == pytest.approx([2.0] * len(rates), rel=0.03)
    assert fmean(rates) == pytest.approx(2.0, rel=0.01)


def test_a_rule_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        SmallNorm(fraction=1.5)


def test_a_group_that_a_crop_has_cut_is_decided_on_first() -> None:
    """Three tokens are left of a group of four: the last of it, then a whole group."""
    rule = NormBelow("value", 1.0, share=0.25)
    norms = torch.tensor([[5.0, 0.1, 5.0, 5.0, 0.2]])
    exact = rule.named(norms, 4, n_before=3, kept_before=torch.tensor([0]))
    assert exact.tolist() == [[False, True, False, False, True]]
