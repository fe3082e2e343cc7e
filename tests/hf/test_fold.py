"""The folded model equals the model with rank-cut weights, and its cache holds latents."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.closeness import LAYERS, assert_near
from tests.hf.tiny import build
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from karhunen.calibration.calibrate import calibrate
from karhunen.fitting import fit
from karhunen.hf.fold import fold, kept_ranks, rank_cut
from karhunen.hf.probe import cache_argument
from karhunen.recipes import make
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.need import SLOTS, Need
from karhunen.transforms.spectra_latent import activations_need

FAMILIES = ["llama", "llama_llama3", "qwen2", "qwen3", "gemma3"]
RANKS = {"gemma3": {2: (20, 11)}}
NEED = activations_need(Need("moments", "key"))


@pytest.fixture(autouse=True, scope="module")
def modules_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers copies a folder's code into a folder of its own; not into the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 99, shape, generator=torch.Generator().manual_seed(seed))


def ranks(family: str) -> dict[int, tuple[int, int]]:
    return RANKS.get(family, {0: (13, 7), 1: (9, 16)})


def built(family: str) -> Any:
    model = build(family)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def statistics(model: Any) -> Statistics:
    return calibrate(model, ids(3, 200, seed=2), [NEED])


def cut(model: Any, found: Statistics, family: str) -> Any:
    """The unfolded rank-cut path: the family's own model, its projections the product of the factors."""
    for layer, pair in ranks(family).items():
        attention = model.model.layers[layer].self_attn
        factors = [rank_cut(attention, slot, found.layers[layer], r) for slot, r in zip(SLOTS, pair, strict=True)]
        for slot, (down, up) in zip(SLOTS, factors, strict=True):
            linear = getattr(attention, f"{slot[0]}_proj")
            with torch.no_grad():
                linear.weight.copy_((down[:-1] @ up).mT)
                if linear.bias is not None:
                    linear.bias.copy_(down[-1] @ up)
    return model


def folded(family: str, folder: Path, **arguments: Any) -> Any:
    model = built(family)
    fold(model, statistics(model), folder, ranks(family), **arguments)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folded_model_equals_the_rank_cut_one(family: str, tmp_path: Path) -> None:
    """At once, and token by token from the cache, whose keys are rebuilt at the positions they stood at."""
    model, tokens = folded(family, tmp_path / "folded"), ids(1, 24)
    plain = built(family)
    plain = cut(plain, statistics(plain), family)
    with torch.no_grad():
        expected = plain(input_ids=tokens).logits
        assert_near(model(input_ids=tokens).logits, expected, LAYERS)
        cache = DynamicCache(config=model.config)
        steps = [
            model(input_ids=part, use_cache=True, **{cache_argument(model): cache}).logits
            for part in tokens.split([9, 1, 1, 13], dim=1)
        ]
    assert_near(torch.cat(steps, 1), expected, LAYERS)
    for layer, (key_rank, value_rank) in ranks(family).items():
        assert cache.layers[layer].keys.shape == (1, 1, 24, key_rank)
        assert cache.layers[layer].values.shape == (1, 1, 24, value_rank)


def test_left_padding_does_not_move_the_keys(tmp_path: Path) -> None:
    model, tokens = folded("llama", tmp_path / "folded"), ids(1, 12)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], 1)
    mask = (torch.arange(17) >= 5).long()[None]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    beside = model.generate(padded, attention_mask=mask, **settings)
    assert alone[0, 12:].tolist() == beside[0, 17:].tolist()


def test_the_corrected_output_projection_is_folded_in(tmp_path: Path) -> None:
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(3))
    model = folded("llama", tmp_path / "folded", output_weights={1: weight})
    assert torch.equal(model.model.layers[1].self_attn.o_proj.weight, weight)
    assert torch.equal(
        model.model.layers[0].self_attn.o_proj.weight, built("llama").model.layers[0].self_attn.o_proj.weight
    )


def test_full_ranks_change_nothing(tmp_path: Path) -> None:
    model, tokens = built("qwen2"), ids(1, 24)
    fold(model, statistics(model), tmp_path / "f", {0: (24, 24), 1: (24, 24)})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "f", trust_remote_code=True).eval()
    with torch.no_grad():
        assert_near(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits, LAYERS)


def test_whoever_reads_new_files_reads_the_folded_models_too(tmp_path: Path) -> None:
    model = built("llama")
    before = os.umask(0o022)
    try:
        fold(model, statistics(model), tmp_path / "f", ranks("llama"))
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode) for path in (tmp_path / "f").iterdir()} == dict.fromkeys(
        (path.name for path in (tmp_path / "f").iterdir()), oct(0o100644)
    )


def test_the_model_that_is_folded_is_left_alone(tmp_path: Path) -> None:
    model = built("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fold(model, statistics(model), tmp_path / "f", ranks("llama"))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not hasattr(model.config, "karhunen_ranks")


def test_ranks_are_those_that_water_filling_keeps() -> None:
    model = built("llama")
    recipe = make("spectra:bits=3,group=4,sink=2")
    codec = fit(recipe, calibrate(model, ids(3, 200, seed=2), recipe.needs()))
    for layer, (key_rank, value_rank) in kept_ranks(codec).items():
        sides = codec.layers[layer].key, codec.layers[layer].value
        assert [len(side.quantizer.widths) for side in sides] == [key_rank, value_rank]
        assert 1 <= key_rank <= 24
    recipe = make("int4")
    with pytest.raises(ValueError, match="layer 0: the keys are not in a latent joined over heads; fold a codec of"):
        kept_ranks(fit(recipe, calibrate(model, ids(3, 200, seed=2), [NEED])))


def test_what_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    model, other = built("llama"), built("gpt_neox")
    found = statistics(model)
    with pytest.raises(ValueError, match="a gpt_neox cannot be folded; tested families are llama, mistral"):
        fold(other, found, tmp_path / "f", {0: (8, 8)})
    with pytest.raises(ValueError, match="rank=25 of the keys is out of range; use 1 to 24"):
        fold(model, found, tmp_path / "f", {0: (25, 8)})
    with pytest.raises(ValueError, match="these statistics do not fit the model"):
        fold(built("qwen2"), found, tmp_path / "f", {0: (8, 8)})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="is not empty; choose another folder"):
        fold(model, found, tmp_path / "full", {0: (8, 8)})
    without = calibrate(model, ids(3, 200, seed=2), [Need("moments", "value")])
    with pytest.raises(ValueError, match="folding needs the activations' Gram matrix"):
        fold(model, without, tmp_path / "g", {0: (8, 8)})
