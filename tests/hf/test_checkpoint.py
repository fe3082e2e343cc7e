"""A model's files say who it is as the loaded model does, and every byte of them counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.tiny import build

from karhunen.hf.checkpoint import checkpoint_fingerprint, checkpoint_folder, checkpoint_identity
from karhunen.hf.describe import describe


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_files_and_the_loaded_model_agree(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = build(family).to(dtype)
    model.save_pretrained(tmp_path)
    identity = describe(model.float())
    assert checkpoint_identity(tmp_path) == (identity.architecture, identity.config_hash, identity.weights_hash)


def test_weights_that_are_no_plain_numbers_have_no_hash(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    header = json.dumps({"w": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    assert checkpoint_identity(tmp_path)[2] == ""


def test_one_weight_makes_another_fingerprint(tmp_path: Path) -> None:
    folders = []
    for name, change in (("a", 0.0), ("b", 0.0), ("c", 1e-3)):
        model: Any = build("llama")
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 5] += change
        model.save_pretrained(tmp_path / name)
        folders.append(checkpoint_fingerprint(tmp_path / name))
    assert folders[0] == folders[1] != folders[2]
    assert all(len(fingerprint) == 32 for fingerprint in folders)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no weights"):
        checkpoint_fingerprint(tmp_path)


def test_a_folder_is_its_own(tmp_path: Path) -> None:
    assert checkpoint_folder(str(tmp_path)) == tmp_path
