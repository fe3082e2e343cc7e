"""`karhunen fold` from the command line: what it writes, what it says, what it refuses."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig


def test_a_codecs_ranks_and_the_corrected_output_are_folded(
    karhunen: Any, model_folder: Path, codec_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    start = ["fold", "--model", model_folder, "--text", text_file, "--max-tokens", 1024, "--json"]
    plain = karhunen(*start, "-o", tmp_path / "plain", "--codec", codec_folder)
    corrected = karhunen(*start, "-o", tmp_path / "corrected", "--codec", codec_folder, "--correct-output")
    assert (plain.code, corrected.code) == (0, 0), plain.err + corrected.err
    said = json.loads(plain.out)
    assert said["cached_elements_per_token"] == sum(sum(pair) for pair in said["ranks"].values())
    assert said["cached_elements_per_token"] < said["dense_elements_per_token"] == 2 * 2 * 2 * 12
    assert AutoConfig.from_pretrained(tmp_path / "plain").karhunen_ranks == said["ranks"]
    assert (tmp_path / "plain" / "tokenizer.json").is_file()
    from safetensors.torch import load_file

    name = "model.layers.0.self_attn.o_proj.weight"
    a, b = (load_file(tmp_path / folder / "model.safetensors")[name] for folder in ("plain", "corrected"))
    assert not torch.equal(a, b)


def test_ranks_are_said_once(karhunen: Any, codec_folder: Path, tmp_path: Path) -> None:
    for given in ([], ["--codec", codec_folder, "--key-rank", 3]):
        done = karhunen("fold", "-o", tmp_path / "f", *given)
        assert done.code == 2
        assert "give either --codec, whose water-filling says the ranks, or --key-rank and --value-rank" in done.err
    assert "--key-rank and --value-rank go together" in karhunen("fold", "-o", tmp_path / "f", "--key-rank", 3).err
    ranks = ["--key-rank", 3, "--value-rank", 3]
    assert "it needs --codec" in karhunen("fold", "-o", tmp_path / "f", *ranks, "--correct-output").err


def test_the_codec_of_another_model_is_refused_before_calibration(
    karhunen: Any, other_model_folder: Path, codec_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    start = ["fold", "--model", other_model_folder, "--text", text_file, "--codec", codec_folder]
    done = karhunen(*start, "-o", tmp_path / "f")
    assert done.code == 2
    assert "this codec does not fit the model: it was made for a llama, this model is a qwen3" in done.err
    assert "calibrating" not in done.err
