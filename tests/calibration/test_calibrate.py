from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.tiny import build

import karhunen
from karhunen.calibration.calibrate import calibrate, layers_to_measure
from karhunen.calibration.steps import min_gradient_tokens
from karhunen.calibration.tokens import sequences
from karhunen.hf.describe import describe
from karhunen.hf.probe import probe_tokens
from karhunen.statistics.artifact import load_statistics, save_statistics
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need

NEEDS = (
    Need("moments", "key", 8, skip_tokens=4),
    Need("samples", "key", 8, skip_tokens=4),
    Need("queries", "key", 8, weighting="attention", skip_tokens=4),
    Need("output_gram", "value"),
)


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 99, shape, generator=torch.Generator().manual_seed(seed))


def run(model: Any, tokens: Any, needs: Any = NEEDS, **settings: Any) -> Statistics:
    return calibrate(model, tokens, needs, **{"min_tokens": 16, "sequence_tokens": 32, **settings})


def assert_same(one: Statistics, other: Statistics, share: float = 1e-9) -> None:
    assert one.model == other.model
    assert one.layers.keys() == other.layers.keys()
    for index, layer in one.layers.items():
        theirs = other.layers[index]
        assert layer.n_tokens == theirs.n_tokens
        assert layer.measured.keys() == theirs.measured.keys()
        for need, statistic in layer.measured.items():
            for name, tensor in vars(statistic).items():
                assert_near(tensor, getattr(theirs.measured[need], name), share)


class Tokenizer:
    """One token per character, behind a begin token, as Gemma's does."""

    bos_token_id = 2

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        letters = [10 + ord(c) % 80 for c in text]
        return {"input_ids": [2, *letters] if add_special_tokens else letters}


def test_statistics_of_two_texts_are_the_sum_of_each() -> None:
    model = build("llama")
    a, b = ids(2, 32), ids(1, 32, seed=2)
    assert_same(run(model, torch.cat([a, b])), run(model, a) + run(model, b))


def test_a_padded_batch_of_a_tokenizer_gives_what_its_sequences_give() -> None:
    model = build("qwen3")
    batch, mask = ids(2, 31), torch.ones(2, 31, dtype=torch.long)
    mask[1, :20] = 0
    padded = run(model, {"input_ids": batch, "attention_mask": mask})
    assert_same(padded, run(model, [batch[0].tolist(), batch[1, 20:].tolist()]))
    assert padded.layers[0].n_tokens == 27 + 7


def test_only_what_was_asked_for_is_gathered_and_in_the_layers_asked_for() -> None:
    model = build("gemma3")
    everywhere = run(model, ids(2, 32), layers=range(3))
    assert list(everywhere.layers) == [0, 1, 2]
    by_default = run(model, ids(2, 32))
    assert list(by_default.layers) == [2]
    assert set(by_default.layers[2].measured) == set(NEEDS)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", (0, 1)), ("mistral", (0, 1)), ("lfm2", (1,)), ("gemma4", (1,))]
)
def test_layers_that_grow_with_the_context_are_measured(family: str, expected: tuple[int, ...]) -> None:
    assert layers_to_measure(describe(build(family))) == expected


def test_each_layer_knows_its_rotation_scale_and_tokens() -> None:
    found = run(build("gemma3"), ids(2, 32), layers=[0, 2]).layers
    assert [layer.n_tokens for layer in found.values()] == [56, 56]
    assert found[0].softmax_scale == pytest.approx(256**-0.5)
    first, last = found[0].key_rotary, found[2].key_rotary
    assert first is not None
    assert last is not None
    assert not torch.equal(first.inv_freq, last.inv_freq)


def test_latent_attention_is_measured_as_it_is_cached() -> None:
    """What is asked of the keys, the part that turns, is measured where the cache has that part: among the values."""
    needs = [Need("moments", "key", 8), Need("moments", "value")]
    layer = run(build("mla"), ids(2, 32), needs).layers[0]
    assert layer.get(Need("moments", "value", 8), Moments).outer.shape == (1, 8, 8)
    assert layer.get(Need("moments", "key"), Moments).outer.shape == (1, 32, 32)
    assert len(layer.measured) == 2
    assert layer.key_rotary is None
    assert layer.value_rotary is not None


def test_text_is_cut_into_sequences_that_begin_as_texts_do() -> None:
    pieces = sequences(["x" * 50, "y" * 7], Tokenizer(), sequence_tokens=21, max_tokens=1000, min_tokens=6)
    assert [len(piece) for piece in pieces] == [21, 21, 11, 8]
    assert all(piece[0] == 2 and (piece[1:] > 2).all() for piece in pieces)


def test_no_more_tokens_than_asked_for_are_run() -> None:
    pieces = sequences("x" * 500, Tokenizer(), sequence_tokens=21, max_tokens=50, min_tokens=6)
    assert [len(piece) for piece in pieces] == [21, 21, 8]


def test_progress_ends_at_all_tokens() -> None:
    told: list[tuple[int, int]] = []
    run(build("llama"), ids(3, 32), progress=lambda done, total: told.append((done, total)))
    assert told == [(32, 96), (64, 96), (96, 96)]


def test_progress_counts_the_text_once_though_some_of_it_is_also_read_backward() -> None:
    told: list[tuple[int, int]] = []
    needs = karhunen.make("karhunen").needs()
    n = min_gradient_tokens(needs)
    model, tokens = build("llama", max_position_embeddings=n), ids(4, n)
    run(
        model,
        tokens,
        needs,
        sequence_tokens=n,
        progress=lambda done, total: told.append((done, total)),
    )
    assert len(told) == 4 + 2, "half of a short text is read backward"
    assert {total for _, total in told} == {tokens.numel()}
    done = [done for done, _ in told]
    assert done == sorted(set(done))
    assert done[-1] == tokens.numel()
    assert done[3] < tokens.numel(), "what is read backward is not done yet"


def test_sequences_are_no_longer_than_the_model_has_positions() -> None:
    model = build("gpt2", n_positions=48)
    found = run(model, "x" * 200, [Need("moments", "key")], tokenizer=Tokenizer(), sequence_tokens=2048)
    assert found.layers[0].n_tokens == 200 + 5  # a begin token before every 47 letters


@pytest.mark.parametrize("given", ["", " \n ", [], ["", " "], [[]]])
def test_empty_text_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="calibration text is empty"):
        run(build("llama"), given, tokenizer=Tokenizer())


def test_text_shorter_than_the_exact_head_of_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="too short: its longest piece has 4 tokens"):
        run(build("llama"), ids(1, 4))


def test_too_few_tokens_are_refused_before_the_model_runs() -> None:
    with pytest.raises(ValueError, match="too short: 32 tokens, of which the first 4"):
        run(build("llama"), ids(1, 32), min_tokens=100)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        run(build("llama"), "some text")


@pytest.mark.parametrize(("family", "message"), [("gpt2", "do not move by a rotation"), ("bloom", "bloom has no RoPE")])
def test_a_rotary_frame_on_a_model_without_rope_is_refused(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(build(family), ids(2, 32), [Need("moments", "key", 64)])
    found = run(build(family), ids(2, 32), [Need("moments", "key")])
    assert found.n_tokens == 64


def test_layers_that_are_never_updated_are_refused_by_number() -> None:
    with pytest.raises(ValueError, match=r"layers \[0\] were never observed.*conv"):
        run(build("lfm2"), ids(2, 32), layers=[0, 1])
    with pytest.raises(ValueError, match="there is no layer 7"):
        run(build("lfm2"), ids(2, 32), layers=[7])


def test_warm_up_batches_of_zeros_count_nowhere() -> None:
    model = build("llama")
    model.model.embed_tokens.weight.data[0] = 0.0
    warm_up = torch.zeros(1, 32, dtype=torch.long)
    assert_same(run(model, torch.cat([warm_up, ids(2, 32)])), run(model, ids(2, 32)))
    with pytest.raises(ValueError, match=r"layers \[0, 1\] were never observed"):
        run(model, warm_up)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_naming_the_layer(poison: float) -> None:
    model = build("llama", attention_bias=True)
    model.model.layers[1].self_attn.v_proj.bias.data[0] = poison
    with pytest.raises(ValueError, match="layer 1: its values hold NaN or infinity"):
        run(model, ids(2, 32))


def test_nan_that_only_the_text_brings_is_refused_naming_the_layer() -> None:
    model = build("llama")
    tokens = ids(2, 32)
    probed = set(probe_tokens(model)[0].tolist())
    rare = next(int(i) for i in tokens.flatten() if int(i) not in probed)
    model.model.embed_tokens.weight.data[rare] = float("nan")
    with pytest.raises(ValueError, match="layer 0: its keys hold NaN or infinity"):
        run(model, tokens)


class Interrupt(Exception):
    pass


def test_an_interrupted_calibration_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("karhunen.calibration.resume.INTERVAL_SECONDS", 0.0)
    model, tokens = build("llama"), ids(4, 32)
    expected = run(model, tokens)

    def stop(done: int, total: int) -> None:
        if done == 96:
            raise Interrupt

    with pytest.raises(Interrupt):
        run(model, tokens, resume_dir=tmp_path / "partial", progress=stop)
    told: list[int] = []
    resumed = run(model, tokens, resume_dir=tmp_path / "partial", progress=lambda done, _: told.append(done))
    assert told == [96, 128]
    assert_same(resumed, expected)
    assert not (tmp_path / "partial").exists()


def test_a_state_of_other_inputs_or_a_damaged_one_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("karhunen.calibration.resume.INTERVAL_SECONDS", 0.0)
    model, tokens, folder = build("llama"), ids(3, 32), tmp_path / "partial"

    def stop(done: int, total: int) -> None:
        if done == 96:
            raise Interrupt

    with pytest.raises(Interrupt):
        run(model, tokens, resume_dir=folder, progress=stop)
    told: list[int] = []
    run(model, ids(3, 32, seed=9), resume_dir=folder, progress=lambda done, _: told.append(done))
    assert told == [32, 64, 96]
    (state,) = folder.iterdir()
    (state / "tensors.safetensors").write_bytes(b"\0" * 100)
    told.clear()
    run(model, tokens, resume_dir=folder, progress=lambda done, _: told.append(done))
    assert told == [32, 64, 96]


def test_what_lies_beside_the_state_of_a_calibration_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("karhunen.calibration.resume.INTERVAL_SECONDS", 0.0)
    (tmp_path / "mine.txt").write_text("precious")

    def put_something_inside(done: int, total: int) -> None:
        for state in list(tmp_path.iterdir()):
            if (state / "config.json").is_file():
                state.with_name(f"{state.name}-copy").mkdir(exist_ok=True)  # named as a state is, but for its end
                (state / "note.txt").write_text("precious")

    run(build("llama"), ids(3, 32), resume_dir=tmp_path, progress=put_something_inside)
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["mine.txt", *["note.txt"] * (len(left) - 1)], "the states themselves are gone"
    assert "note.txt" in left


def test_calibration_leaves_the_model_and_the_tokenizer_as_they_were() -> None:
    model, tokenizer = build("llama").train(), SimpleNamespace()
    run(model, ids(2, 32), tokenizer=tokenizer)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert vars(tokenizer) == {}


def test_statistics_survive_the_disk(tmp_path: Path) -> None:
    found = run(build("gemma3"), ids(2, 32), layers=range(3))
    save_statistics(found, tmp_path / "statistics")
    again = load_statistics(tmp_path / "statistics")
    assert_same(again, found, share=0.0)
    assert again.sources == found.sources
    for index, layer in found.layers.items():
        key, theirs = layer.key_rotary, again.layers[index].key_rotary
        assert key is not None
        assert theirs is not None
        assert torch.equal(key.inv_freq, theirs.inv_freq)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "no artifact at"),
        ("truncated", "truncated or altered"),
        ("version", "format version 99"),
        ("format", "holds 'something'"),
    ],
)
def test_damaged_statistics_are_refused_in_one_line(damage: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "statistics"
    config, tensors = folder / "config.json", folder / "tensors.safetensors"
    if damage != "missing":
        save_statistics(run(build("llama"), ids(2, 32)), folder)
    if damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-10])
    if damage == "version":
        config.write_text(config.read_text().replace('"version": 1', '"version": 99'))
    if damage == "format":
        config.write_text(config.read_text().replace("karhunen-statistics", "something"))
    with pytest.raises(ValueError, match=message) as error:
        load_statistics(folder)
    assert "\n" not in str(error.value)
