"""`karhunen plan`: what it prints is the arithmetic's; `--check` compares it with the model as it runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.cli.test_usage import assert_refused
from tests.cli.test_verbs import document

from karhunen.card import Gate, ReportCard
from karhunen.codec import Codec

LLAMA = ["plan", "llama-3.1-8b", "--memory", "24GiB", "--reserve", "1.12GB"]


def test_the_papers_capacities_are_printed(karhunen: Command) -> None:
    done = karhunen(*LLAMA, "--ratio", 12.19, "--weights", "float16")
    assert done.code == 0, done.err
    assert "65,531" in done.out
    assert "798,823 (12.2×)" in done.out
    said = document(karhunen(*LLAMA, "--ratio", 12.19, "--json").out)
    assert [row["max_context"] for row in said["rates"]] == [65531, 798823]
    assert said["dense_bytes_per_token"] == 131072
    assert said["rates"][1]["times_dense"]["context"] == pytest.approx(12.19, rel=1e-4)


def test_the_cache_of_70b_is_printed_to_the_byte(karhunen: Command) -> None:
    done = karhunen("plan", "Llama-3.1-70B", "--context", 32000, "--batch", 16, "--ratio", 8)
    assert "167,772,160,000" in done.out
    assert "give --memory 24GiB" in done.out
    assert "give --bandwidth 3.35TB/s" in done.out


def test_a_recipe_is_planned_with_its_own_bits_and_its_window(karhunen: Command) -> None:
    arguments = ["plan", "llama-3.1-8b", "--context", 4096, "--recipe", "karhunen:bits=2", "--recipe", "kivi:bits=4"]
    (dense, ours, kivi) = document(karhunen(*arguments, "--json").out)["rates"]
    assert dense["ratio"] == 1
    assert ours["nominal_ratio"] == 8
    n_exact = 4 + 128 + (4096 - 132) % 16
    assert ours["held_bytes"] == 65536 * (n_exact * 16 + (4096 - n_exact) * 2) / 8
    assert kivi["bits_per_coded_element"] == 5  # two float16 numbers for each 32
    shown = karhunen(*arguments).out
    assert "8.00×" in shown
    assert f"{ours['ratio']:.2f}×" in shown
    assert "4 first and 128 to 143 newest tokens exact" in shown
    assert "storage of transforms" in shown


def test_a_bare_recipe_is_planned_at_all_its_rates(karhunen: Command) -> None:
    said = document(karhunen("plan", "qwen2.5-0.5b", "--recipe", "karhunen", "--json").out)
    assert [row["bits_per_coded_element"] for row in said["rates"]] == [None, 4, 2, 1.333, 1]
    assert {"the keys have a bias", "calibrate on what you serve"} <= {remark["said"] for remark in said["warnings"]}


def test_a_folder_and_its_config_are_read_as_the_model_is(karhunen: Command, model_folder: Path) -> None:
    for given in (model_folder, model_folder / "config.json"):
        said = document(karhunen("plan", given, "--ratio", 4, "--json").out)
        assert said["dense_bytes_per_token"] == 2 * 2 * 2 * 12 * 2  # layers, sides, heads, head size, bfloat16
        assert said["architecture"] == "llama"
        assert said["work"]["context"] == 512


def test_calibration_is_priced_by_its_own_arithmetic(karhunen: Command, model_folder: Path) -> None:
    done = karhunen("plan", model_folder, "--calibration", "--recipe", "karhunen:bits=2", "--json")
    (said,) = document(done.out)["calibration"]
    assert said["recipe"] == "karhunen"
    assert said["said"].startswith("memory: cpu ")
    table = karhunen("plan", "smollm2", "--calibration", "--memory", "100MB", "--recipe", "int8", "--recipe", "spectra")
    assert "calibrating spectra, 16,384 tokens, bfloat16: calibration does not fit" in table.out
    assert "calibrating int8" not in table.out


def test_a_picture_is_drawn_of_the_same_numbers(karhunen: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    done = karhunen(*LLAMA, "--ratio", 8, "--plot", file)
    assert done.code == 0, done.err
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_line_for_each_rate() -> None:
    from karhunen.evaluation.results.plan_plot import plan_figure
    from karhunen.planning import table
    from karhunen.planning.capacity import Machine, Work
    from karhunen.planning.plan import make_plan
    from karhunen.planning.rate import nominal

    shape = table.find("llama-3.1-8b")
    assert shape is not None
    plan = make_plan(shape, Machine(24 * 2**30), Work(), [nominal(8, shape)])
    left, right = plan_figure(plan).axes
    dense, coded = left.lines[:2]
    tokens, bytes_dense = dense.get_data()
    assert bytes_dense[-1] == pytest.approx((16_060_522_496 + 131072 * tokens[-1]) / 1e9)
    assert coded.get_ydata()[-1] == pytest.approx((16_060_522_496 + 131072 / 8 * tokens[-1]) / 1e9)
    assert list(right.lines[1].get_ydata()) == pytest.approx([8] * len(tokens))
    assert left.lines[-1].get_ydata()[0] == pytest.approx(24 * 2**30 / 1e9)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--memory", "lots"], ["'lots' is no size of memory"]),
        (["--bandwidth", "fast"], ["'fast' is no bandwidth"]),
        (["--memory", "24GB", "--reserve", "30GB"], ["leaves nothing"]),
        (["--reserve", "105%"], ["'105%' is not a share"]),
        (["--weights", "tiny"], ["'tiny' is neither a dtype"]),
        (["--cache-dtype", "bf16"], ["unknown dtype 'bf16'"]),
        (["--context", "0"], ["--context"]),
        (["--ratio", "0.5"], ["is not a compression ratio"]),
        (["--recipe", "karhunnen"], ["did you mean karhunen"]),
        (["--plot", "plan.txt"], ["no kind of picture"]),
        (["--plot", "nowhere/plan.png"], ["there is no folder"]),
        (["--check", "nothing"], ["nothing"]),
    ],
)
def test_wrong_usage_is_one_line(karhunen: Command, more: list[str], words: list[str]) -> None:
    assert_refused(karhunen("plan", "llama-3.1-8b", *more), *words)


def test_an_unknown_model_is_refused_with_those_there_are(karhunen: Command) -> None:
    assert_refused(karhunen("plan", "lama-3"), "'lama-3' is neither a model of the table", "llama-3.1-8b")


def carded(codec_folder: Path, folder: Path, top1: float) -> Path:
    """The codec with a report card whose one gate passes from 0.95 on."""
    codec = Codec.from_pretrained(codec_folder)
    gate = Gate("top-1 agreement", top1, 0.95, at_least=True)
    card = ReportCard(codec.fingerprint(), "tiny", "float32", (), 80, 3.0, 16 / 3, (gate,), {})
    replace(codec, card=card).save_pretrained(folder)
    return folder


def test_the_check_list_compares_the_plan_with_the_model(
    karhunen: Command, model_folder: Path, codec_folder: Path, tmp_path: Path
) -> None:
    words = ["plan", model_folder, "--check-tokens", 256, "--max-step", 1e6, "--ratio", 5, "--check"]
    done = karhunen(*words, carded(codec_folder, tmp_path / "good", 0.99), "--json")
    said = document(done.out)["check"]
    lines = {line["name"]: line for line in said["lines"]}
    assert done.code == 0, json.dumps(said, indent=1)
    assert said["passed"]
    assert lines["quality"]["said"].startswith("verified on tiny")
    assert "2 layers with keys and values, 96 numbers a token" in lines["layers as planned"]["said"]
    assert "bytes measured" in lines["memory of coded layers"]["said"]
    assert {"bytes fell", "step time", "stays exact"} <= lines.keys()
    bad = karhunen(*words, carded(codec_folder, tmp_path / "bad", 0.5))
    assert bad.code == 3
    assert "NOT good enough" in " ".join(bad.out.split())
    slow = karhunen(*words, tmp_path / "good", "--max-step", 1e-6)
    assert slow.code == 3
    assert "failed" in slow.out


def test_a_check_of_another_model_is_refused(
    karhunen: Command, other_model_folder: Path, codec_folder: Path, tmp_path: Path
) -> None:
    codec = carded(codec_folder, tmp_path / "codec", 0.99)
    done = karhunen("plan", other_model_folder, "--ratio", 5, "--check", codec, "--json")
    assert_refused(done, "this codec does not fit the model")


def test_a_plan_that_is_not_the_models_fails_the_check(codec_folder: Path) -> None:
    from karhunen.evaluation.adoption import _planned_layers
    from karhunen.planning.shape import CacheLayer, ModelShape

    codec = Codec.from_pretrained(codec_folder)
    right, wrong = (ModelShape("m", "", "", (CacheLayer("full", h, 4, 12, 12),) * 2) for h in (2, 4))
    assert _planned_layers(right, codec).passed
    assert not _planned_layers(wrong, codec).passed


@pytest.mark.parametrize("share", ["nan", "inf", "0", "-1"])
def test_a_step_that_may_take_anything_is_refused(karhunen: Command, share: str) -> None:
    assert_refused(karhunen("plan", "llama-3.1-8b", "--max-step", share), "above 0")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_key_value_heads": "two"}, "num_key_value_heads"),
        ({"num_key_value_heads": -2}, "negative"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, "nonsense"),
        ({"num_attention_heads": 0}, "make no model"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads on 3 KV heads"),
    ],
    ids=["a word", "negative", "a fraction", "an unknown rotation", "nothing", "heads that do not divide"],
)
def test_settings_that_make_no_model_are_one_line(
    karhunen: Command, model_folder: Path, tmp_path: Path, wrong: dict[str, object], said: str
) -> None:
    own = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**own, **wrong}), encoding="utf-8")
    assert_refused(karhunen("plan", tmp_path), said)
