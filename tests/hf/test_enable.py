"""`karhunen.enable`: one call after `import karhunen`, in a process that has done nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.hf.tiny import build
from torch import nn

import karhunen
from karhunen.hf.attention import NAME

ROOT = Path(__file__).parents[2]


def run_fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": "src:."}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_the_first_thing_that_is_done_with_karhunen() -> None:
    said = run_fresh(
        "import karhunen; from tests.hf.tiny import build; model = build('llama'); karhunen.enable(model); "
        "import torch; model(torch.arange(9)[None]); print(model.config._attn_implementation)"
    )
    assert said.strip() == NAME


def test_importing_karhunen_changes_nothing_in_transformers() -> None:
    said = run_fresh(
        "import transformers; before = set(transformers.AttentionInterface()); import karhunen; karhunen.make('int4'); "
        "print(sorted(set(transformers.AttentionInterface()) - before), 'karhunen.hf' in __import__('sys').modules)"
    )
    assert said.strip() == "[] False"


def test_an_enabled_model_computes_what_it_did_and_the_way_back_is_transformers_own() -> None:
    model, ids = build("llama"), torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids).logits
        karhunen.enable(model)
        assert torch.equal(model(ids).logits, before)
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_a_model_whose_attention_cannot_be_exchanged_is_refused() -> None:
    with pytest.raises(ValueError, match="the attention of Linear cannot be exchanged"):
        karhunen.enable(nn.Linear(2, 2))
