"""Whatever a user may call calibration input is read or refused in one line, before the model runs on any of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tests.hf.tiny import SIZES, build
from torch import Tensor

from karhunen import recipes
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.steps import min_gradient_tokens
from karhunen.calibration.tokens import sequences
from karhunen.fitting import fit
from karhunen.hf.describe import describe
from karhunen.hf.rotary import detect_rotary
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.windows.sink_recent import SinkRecent

LETTERS = "abcdefgh" * 4
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": LETTERS}]


class Tokenizer:
    """A token per character; chats are laid end to end."""

    bos_token_id = None
    chat_template = "there is one"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 90 for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(message["content"] for message in messages)


class DataSet:
    """Columns, as those of `datasets`."""

    column_names = ("id", "text")

    def __getitem__(self, name: str) -> list[str]:
        return {"text": [LETTERS, LETTERS]}[name]


def read(given: Any) -> list[list[int]]:
    return [piece.tolist() for piece in sequences(given, Tokenizer(), 1000, 1000, 2)]


def ids(text: str = LETTERS) -> list[int]:
    return Tokenizer()(text)["input_ids"]


ONE: dict[str, Callable[[Path], Any]] = {
    "a path": lambda folder: folder,
    "a path as text": str,
    "paths": lambda folder: [folder / "a.txt"],
    "an iterator": lambda _: iter([LETTERS]),
    "rows": lambda _: [{"text": LETTERS}],
    "a column": lambda _: {"text": [LETTERS]},
    "flat ids": lambda _: ids(),
    "nested ids": lambda _: [ids()],
    "a flat tensor": lambda _: torch.tensor(ids()),
    "tensors": lambda _: [torch.tensor(ids())],
    "an array": lambda _: torch.tensor([ids()]).numpy(),
    "a batch of lists": lambda _: {"input_ids": [ids()]},
    "a padded batch of lists": lambda _: {"input_ids": [[0, *ids()]], "attention_mask": [[0] + [1] * 32]},
    "rows of ids": lambda _: [{"input_ids": ids()}],
}


@pytest.mark.parametrize("kind", ONE)
def test_every_kind_of_input_is_the_text_that_it_holds(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LETTERS)
    assert read(ONE[kind](tmp_path)) == [ids()]


def test_chats_and_data_sets_are_read() -> None:
    said = ids("Why?" + LETTERS)
    for given in (CHAT, [CHAT], [{"messages": CHAT}], {"messages": [CHAT]}):
        assert read(given) == [said]
    assert read(DataSet()) == [ids(), ids()]


WRONG: dict[str, tuple[Any, str]] = {
    "none": (None, "a NoneType cannot be calibrated on; give text, a path"),
    "a number": (3, "a int cannot be calibrated on"),
    "no column": ({"words": [LETTERS]}, r"no column of text among \['words'\]"),
    "rows without a column": ([{"words": LETTERS}], r"no column of text among \['words'\]"),
    "floats": (torch.rand(2, 30), r"token ids are whole numbers, and these are torch\.float32"),
    "a list of floats": ([[0.5, 1.5]], "a float is among the token ids"),
    "three axes": (torch.zeros(1, 2, 30).long(), r"\[sequences, tokens\] or \[tokens\], not \(1, 2, 30\)"),
    "text among ids": ([LETTERS, 3], "a int is among the calibration texts"),
    "nothing": ([], "the calibration text is empty"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_input_is_refused_in_one_line(kind: str) -> None:
    given, said = WRONG[kind]
    with pytest.raises(ValueError, match=said) as caught:
        read(given)
    assert "\n" not in str(caught.value)


# the model


@cache
def llama() -> Any:
    return build("llama")


def tokens(n: int, b: int = 2) -> Tensor:
    return torch.randint(3, 99, (b, n), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("number", [0, -5])
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "sequence_tokens"])
def test_numbers_of_tokens_are_one_or_more(name: str, number: int) -> None:
    settings: dict[str, Any] = {name: number}
    with pytest.raises(ValueError, match=f"{name}={number} counts tokens; use 1 or more"):
        calibrate(llama(), tokens(300), [Need("moments", "key")], **settings)


@pytest.mark.parametrize(("shift", "said"), [(90, "token id 188"), (-50, "token id -47")])
def test_ids_outside_the_vocabulary_are_refused(shift: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} is outside the model's vocabulary of 99"):
        calibrate(llama(), tokens(300) + shift, [Need("moments", "key")])


def test_gradients_are_refused_where_they_cannot_be_had() -> None:
    needs = recipes.make("karhunen").needs()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"which torch\.inference_mode\(\) rules out"):
        calibrate(llama(), tokens(300), needs)
    with pytest.raises(ValueError, match="LlamaModel has no output embedding"):
        calibrate(llama().model, tokens(300), needs)
    bad = build("llama", tie_word_embeddings=False)
    bad.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match="output embedding holds NaN or infinity"):
        calibrate(bad, tokens(300), needs)


@pytest.mark.parametrize("name", ["oscar", "nova_kv"])
def test_latent_attention_is_refused_before_any_work_by_what_asks_how_it_reads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr("karhunen.calibration.calibrate._run", run)
    with pytest.raises(
        ValueError, match=r"layer 0: .* does not read the cached keys .* the Fisher metric, such as karhunen"
    ):
        calibrate(build("mla"), tokens(300), recipes.make(name).needs())


def test_a_model_of_sliding_windows_alone_is_refused_before_any_work() -> None:
    model = build("mistral")
    with pytest.raises(ValueError, match="every layer of this mistral that attends does so in a sliding window"):
        calibrate(model, tokens(300), recipes.make("spectra").needs())
    assert set(calibrate(model, tokens(300), [Need("moments", "key")], layers=[0]).layers) == {0}


def test_layers_without_positions_are_coded_as_they_are_beside_sliding_ones_that_turn() -> None:
    recipe = replace(recipes.make("spectra:group=4"), window=SinkRecent())
    codec = fit(recipe, calibrate(build("llama4", num_hidden_layers=4), tokens(300), recipe.needs()))
    assert {layer.key.rotary for layer in codec.layers.values()} == {None}


def test_keys_that_a_recurrent_layer_moves_are_not_said_to_have_learned_positions() -> None:
    config = tf.GraniteMoeHybridConfig(
        **SIZES, layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=24, mamba_d_state=8,
        mamba_n_groups=1, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32, pad_token_id=0,
    )  # fmt: skip
    model = tf.GraniteMoeHybridForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    assert "learned" not in detect_rotary(model)[1].note
    with pytest.raises(ValueError, match=r"has no RoPE, so .*; use a recipe that codes keys as they are cached"):
        calibrate(model, tokens(300), recipes.make("spectra").needs())
    assert describe(model).layers[1].kind == "full"


def test_the_recent_window_of_a_recipe_is_that_of_its_gradients() -> None:
    def near(text: str) -> set[int]:
        return {need.near_tokens for need in recipes.make(text).needs() if need.kind == "gradients"}

    assert near("karhunen") == {128}
    assert near("karhunen:recent=32") == {32}
    assert min_gradient_tokens(recipes.make("karhunen:recent=32").needs()) == 168
    asked = [need for text in ("karhunen", "karhunen:recent=32") for need in recipes.make(text).needs()]
    asked = [need for need in asked if need.kind == "gradients" and need.slot == "value"]
    layer = calibrate(llama(), tokens(300), asked).layers[0]
    usual, short = (float(layer.get(need, Moments).outer.abs().sum()) for need in asked)
    assert short > 1.1 * usual, "more reads count"
    with pytest.raises(ValueError, match="read by tokens 400 or more after it: at least one sequence has to have 536"):
        calibrate(llama(), tokens(300), recipes.make("karhunen:recent=400").needs())
