"""`karhunen.enable`: one call after `import karhunen`, in a process that has done nothing else."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.test_cache import codec_of
from tests.hf.tiny import build
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import karhunen
from karhunen.codec import Codec
from karhunen.hf.attention import NAME, register

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


CHANGED = """
import importlib, inspect, pkgutil, sys
import torch, transformers, transformers.masking_utils
from tests.hf.tiny import build

build("llama")(torch.arange(9)[None])
from transformers.models.auto import modeling_auto

def entries():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "transformers":
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                found.update({(name, key, k): v for k, v in vars(value).items() if not k.startswith("_abc")})
    return found

def registries():
    names = (transformers.AttentionInterface, transformers.masking_utils.AttentionMaskInterface)
    models = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content
    return [sorted(registry().valid_keys()) for registry in names] + [sorted(map(str, models))]

before, registered = entries(), registries()
import karhunen, karhunen.hf
for info in pkgutil.iter_modules(karhunen.hf.__path__):
    importlib.import_module(f"karhunen.hf.{info.name}")
after = entries()
print([key for key, value in before.items() if after.get(key) is not value], registries() == registered)
"""


def test_importing_karhunen_changes_nothing_in_transformers() -> None:
    assert run_fresh(CHANGED).strip() == "[] True"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """The name is not known to transformers, until something registers it; says whether that is so."""
    registries = AttentionInterface, AttentionMaskInterface
    for registry in registries:
        rest = {name: function for name, function in registry._global_mapping.items() if name != NAME}
        monkeypatch.setattr(registry, "_global_mapping", rest)
    return lambda: all(NAME not in registry().valid_keys() for registry in registries)


USES: dict[str, Callable[[Any, Codec], Any]] = {
    "enable": lambda model, codec: karhunen.enable(model),
    "compressed": lambda model, codec: karhunen.compressed(model, codec).__enter__(),
    "CompressedCache": karhunen.CompressedCache,
    "register": lambda model, codec: register(),
}


@pytest.mark.parametrize("use", USES)
def test_the_name_is_known_after_the_first_use_of_what_reads_bytes(unknown: Callable[[], bool], use: str) -> None:
    model = build("llama")
    codec = codec_of(model, "int4:group=8")
    assert unknown()
    USES[use](model, codec)
    known = [sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys())]
    assert all(NAME in names for names in known)
    USES[use](model, codec)
    assert known == [sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys())]
    model.set_attn_implementation(NAME)
    assert model(torch.arange(9)[None]).logits.isfinite().all()


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
