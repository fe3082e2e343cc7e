"""Every verb on a tiny model: what it prints is what the library says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Command, save_tiny

from karhunen import recipes
from karhunen.codec import Codec
from karhunen.kernels.paths import fastest

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def document(out: str) -> Any:
    """The one JSON document that stdout is."""
    return json.loads(out)


def test_calibrate_writes_a_codec_and_says_what_it_wrote(
    karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    arguments = ["calibrate", "--model", model_folder, "--text", text_file, "-o", tmp_path / "codec"]
    done = karhunen(*arguments, "--recipe", "int4:group=8", "--json")
    assert done.code == 0, done.err
    said, codec = document(done.out), Codec.from_pretrained(tmp_path / "codec")
    assert said["codec_fingerprint"] == codec.fingerprint()
    assert said["recipe_fingerprint"] == recipes.make("int4:group=8").fingerprint()
    assert said["table_bytes"] == codec.table_bytes()
    assert said["coded_layers"] == [0, 1]
    assert said["statistics"] is None
    assert not (tmp_path / "codec" / "statistics").exists()


def test_statistics_kept_once_fit_the_same_codec_again(karhunen: Command, codec_folder: Path, tmp_path: Path) -> None:
    recipe = "spectra:bits=3,group=8,recent=16"
    arguments = ["calibrate", "--statistics", codec_folder / "statistics", "--recipe", recipe]
    done = karhunen(*arguments, "-o", tmp_path / "again")
    assert done.code == 0, done.err
    assert not CONTROL.search(done.out + done.err)
    again, first = Codec.from_pretrained(tmp_path / "again"), Codec.from_pretrained(codec_folder)
    assert again.fingerprint() == first.fingerprint()


def test_generate_prints_the_account_of_the_bytes_it_held(
    karhunen: Command, model_folder: Path, codec_folder: Path
) -> None:
    prompt = "a prompt that is longer than the window, so that something is coded " * 3
    arguments = ["generate", "--model", model_folder, "--codec", codec_folder, "-p", prompt, "--max-new-tokens", 8]
    done = karhunen(*arguments, "--json")
    assert done.code == 0, done.err
    said = document(done.out)
    held = said["cache"]["bytes"]
    assert held["held"] == held["codes"] + held["scales_and_gains"] + held["exact_tokens"]
    assert held["held"] < held["dense"]
    assert held["codes"] > 0
    assert said["cache"]["ratio"] == pytest.approx(held["dense"] / held["held"], rel=1e-5)
    n_tokens = said["prompt_tokens"] + said["new_tokens"] - 1
    assert held["dense"] == 2 * 2 * 2 * 12 * 4 * n_tokens  # layers, sides, heads, head size, float32

    shown = karhunen(*arguments)
    assert shown.code == 0, shown.err
    assert said["text"].strip() in shown.out
    assert f"{held['held']:,}" in shown.out
    assert not CONTROL.search(shown.err)


def test_generate_says_why_a_short_text_is_not_compressed(
    karhunen: Command, model_folder: Path, codec_folder: Path
) -> None:
    arguments = ["generate", "--model", model_folder, "--codec", codec_folder, "--raw", "--max-new-tokens", 2]
    short, long = (karhunen(*arguments, "-p", "x" * n) for n in (4, 100))
    assert "nothing was coded: the codec's window keeps all of so short a text exact" in short.out
    assert "SinkRecent" not in short.out
    assert re.search(r"coded tokens +│ +none coded", short.out)
    assert "nothing was coded" not in long.out


def test_generate_from_an_exact_cache_says_what_the_model_says(
    karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    from karhunen.hf.embedded import load

    arguments = ["--model", model_folder, "--text", text_file]
    assert karhunen("calibrate", "--recipe", "full", *arguments, "-o", tmp_path / "full").code == 0
    prompt = "what would an uncompressed cache have said? " * 2
    start = ["generate", "--model", model_folder, "--codec", tmp_path / "full", "--prompt", prompt, "--json"]
    raw = document(karhunen(*start, "--max-new-tokens", 12, "--raw").out)
    model, tokenizer = load(model_folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=1)
    assert raw["text"] == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert raw["prompt_tokens"] == ids.shape[1]
    chat = document(karhunen(*start, "--max-new-tokens", 12).out)
    assert chat["prompt_tokens"] > raw["prompt_tokens"], "the chat template is on by default"


def test_sampling_with_a_seed_repeats_itself(karhunen: Command, model_folder: Path, codec_folder: Path) -> None:
    start = ["generate", "--model", model_folder, "--codec", codec_folder, "-p", "roll the dice", "--json"]
    options = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.99, "--max-new-tokens", 12]
    texts = [document(karhunen(*start, *options, "--seed", seed).out)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_inspect_shows_the_plan_and_counts_the_tables(karhunen: Command, codec_folder: Path) -> None:
    codec = Codec.from_pretrained(codec_folder)
    said = document(karhunen("inspect", codec_folder, "--json").out)
    assert said["recipe"] == "spectra"
    assert said["codec_fingerprint"] == codec.fingerprint()
    assert said["table_bytes"] == codec.table_bytes()
    assert [(side["layer"], side["slot"]) for side in said["sides"]] == [
        (layer, slot) for layer in (0, 1) for slot in ("key", "value")
    ]
    for side in said["sides"]:
        layout = codec.layers[side["layer"]].side(side["slot"]).layout
        assert side["code_bytes_per_token"] == layout.bytes_per_token
        assert side["bits_per_element"] <= 3 + 8 / side["elements_per_token"], "at most the budget and a last byte"
    shown = karhunen("inspect", codec_folder)
    assert shown.code == 0, shown.err
    for words in ("composition", "bit plan", "RopeFrame", "SinkRecent", f"{codec.table_bytes():,}"):
        assert words in shown.out
    assert not CONTROL.search(shown.out)


def test_heads_of_one_plan_are_one_row(karhunen: Command, model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    """A plan of thirty layers and as many heads is not to scroll away."""
    arguments = ["calibrate", "--model", model_folder, "--text", text_file, "--recipe", "int4:group=12"]
    assert karhunen(*arguments, "-o", tmp_path / "codec").code == 0
    plan = karhunen("inspect", tmp_path / "codec").out.split("bit plan")[1].split("storage plan")[0]
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in plan.splitlines() if line.startswith("│")]
    assert rows == [[str(layer), slot, "0 to 1"] for layer in (0, 1) for slot in ("key", "value")]


def test_inspect_says_why_layers_are_exact(karhunen: Command, text_file: Path, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "gemma3", "gemma3")
    arguments = ["calibrate", "--model", folder, "--text", text_file, "--recipe", "int4:group=8"]
    assert karhunen(*arguments, "-o", tmp_path / "codec").code == 0
    said = document(karhunen("inspect", tmp_path / "codec", "--json").out)
    assert sorted(said["left_exact"]) == ["0", "1"]
    assert "sliding window of 16 tokens" in said["left_exact"]["0"]
    assert "sliding window of 16 tokens" in karhunen("inspect", tmp_path / "codec").out


def test_recipes_lists_every_recipe_with_its_options(karhunen: Command) -> None:
    rows = document(karhunen("recipes", "--json").out)["recipes"]
    assert [row["name"] for row in rows] == recipes.names()
    by_name = {row["name"]: row for row in rows}
    assert by_name["kivi"]["source"] == "arXiv:2402.02750"
    assert by_name["kivi"]["options"]["group"] == 32
    assert by_name["int4"]["measured_bits"]["coded"] == 4.5
    assert by_name["spectra"]["needs_calibration"]
    assert not by_name["int4"]["needs_calibration"]
    assert by_name["spectra"]["key"]["frame"] == "RopeFrame(block_tokens=1, joined=True)"
    shown = karhunen("recipes").out
    assert all(name in shown for name in recipes.names())
    assert not CONTROL.search(shown)


def test_doctor_names_versions_paths_and_models(karhunen: Command) -> None:
    said = document(karhunen("doctor", "--json").out)
    assert said["versions"]["torch"] == torch.__version__
    assert said["index"] is None, "nobody asked"
    assert {"kernel": "byte_attention", "path": "naive", "live": True, "reason": "plain torch"} in said["fast_paths"]
    path, reason = fastest("scan_attention", "cpu")
    assert {"device": "cpu", "path": path, "reason": reason} in said["attention"]
    missing = {"kernel": "exact_attention", "path": "gpu", "live": False}
    assert {**missing, "reason": "no GPU kernel is written for exact_attention"} in said["fast_paths"]
    assert [model["name"] for model in said["models"]] == ["smollm2", "gemma3-270m"]
    assert "byte_attention.naive" in karhunen("doctor").out


@pytest.mark.slow
def test_demo_measures_what_it_prints(karhunen: Command, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", max_position_embeddings=4096)
    sizes = ["--calibration-tokens", 2048, "--prompt-tokens", 1800, "--scored-tokens", 32]
    done = karhunen("demo", "--model", folder, "--recipe", "int8:group=8", *sizes, "--json")
    assert done.code == 0, done.err
    said = document(done.out)
    assert said["scored"]["tokens"] == 32
    assert said["scored"]["prefill_tokens"] == 1800
    assert 0 <= said["scored"]["kl_nats"] < 0.1
    assert said["dense"]["n_prompt_tokens"] == said["coded"]["n_prompt_tokens"] > 1800
    bits = 8 + 32 / 6  # of a coded element against 16: the range of a group of 6, the largest divisor of 12 up to 8
    assert 1.1 < said["cache"]["ratio"] < 16 / bits, "a few exact tokens keep the ratio below that of the codes"
    assert said["fact_tokens_before_end"] > 132, "the fact is not among the exact tokens"
