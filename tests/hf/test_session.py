"""A cache that was written and read goes on as if it had never stopped: the same logits, bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.test_cache import bits, cache_of, fitted, generate, model_of, run, tokens
from tests.hf.tiny import build

from karhunen.folder import CONFIG
from karhunen.hf.cache import CompressedCache
from karhunen.hf.fingerprint import tokenizer_fingerprint, weights_fingerprint
from karhunen.hf.session import load_session, save_session

RECIPES = ("full", "int4", "kivi", "kvtc", "nova_kv", "spectra", "karhunen")
FAMILIES = ("llama", "qwen2", "gemma3", "mla", "lfm2")
N_PROMPT, N_MORE = 45, 14


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def go_on(model: Any, held: CompressedCache, n: int = N_MORE) -> list[torch.Tensor]:
    """Logits of single steps, in the middle of which tokens leave the window."""
    more = tokens(1, n, seed=5)
    return [run(model, more[:, i : i + 1], held) for i in range(n)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_goes_on_as_if_it_had_never_stopped(family: str, name: str, tmp_path: Path) -> None:
    model, held = model_of(family), cache_of(family, name)
    run(model, tokens(1, N_PROMPT), held)
    held.save(tmp_path / "session", tokens(1, N_PROMPT))
    restored = CompressedCache.load(model, tmp_path / "session")
    assert restored.get_seq_length() == N_PROMPT
    assert bits(restored) == bits(held)
    want, got = go_on(model, held), go_on(model, restored)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert bits(restored) == bits(held)
    for a, b in zip(held.report().layers, restored.report().layers, strict=True):
        assert (a.n_tokens, a.n_coded, a.reason) == (b.n_tokens, b.n_coded, b.reason)


@pytest.mark.parametrize(
    ("family", "name"),
    [("falcon_h1", "int4"), ("qwen3_next", "kivi"), ("gpt_oss", "int8"), ("gemma3n", "int8"), ("llama", "h2o"),
     ("llama", "snapkv_int4"), ("llama", "streaming_int4"), ("gemma3", "key_norm")],
)  # fmt: skip
def test_every_kind_of_layer_and_window_is_resumed(family: str, name: str, tmp_path: Path) -> None:
    model, held = model_of(family), cache_of(family, name)
    run(model, tokens(1, N_PROMPT), held)
    held.save(tmp_path / "session")
    restored = CompressedCache.load(model, tmp_path / "session")
    assert all(torch.equal(a, b) for a, b in zip(go_on(model, held), go_on(model, restored), strict=True))


def test_left_padding_and_several_rows_are_resumed(tmp_path: Path) -> None:
    model, held, ids = model_of("llama"), cache_of("llama", "karhunen"), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    generate(model, ids, held, attention_mask=mask)
    held.save(tmp_path / "session")
    restored = CompressedCache.load(model, tmp_path / "session")
    more = torch.cat([ids, tokens(2, 13, seed=3)], dim=1)
    mask = torch.cat([mask, torch.ones(2, 13, dtype=mask.dtype)], dim=1)
    assert restored.batch_size == 2  # type: ignore[attr-defined]
    assert generate(model, more, restored, attention_mask=mask) == generate(model, more, held, attention_mask=mask)


@pytest.mark.parametrize("settings", [{"exact_dtype": torch.bfloat16}, {"keep_decoded": True}], ids=str)
def test_settings_of_the_cache_are_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    model = model_of("llama")
    held = CompressedCache(model, fitted("llama", "karhunen"), **settings)
    run(model, tokens(1, N_PROMPT), held)
    held.save(tmp_path / "session")
    restored = CompressedCache.load(model, tmp_path / "session")
    first = restored.coded_layers()[0]
    assert (first.exact_dtype, first.store.keeps_decoded) == (
        settings.get("exact_dtype"), settings.get("keep_decoded", False),
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(go_on(model, held), go_on(model, restored), strict=True))


def test_what_is_said_of_a_session_is_kept(tmp_path: Path) -> None:
    model, held, ids = model_of("llama"), cache_of("llama", "int4"), tokens(1, 20)
    run(model, ids, held)
    held.save(tmp_path / "session", ids)
    _, state = load_session(model, tmp_path / "session")
    assert state.tokens is not None
    assert torch.equal(state.tokens, ids)
    assert (state.dtype, state.made_by) == ("float32", held.codec.description)
    held.save(tmp_path / "session", torch.cat([ids, ids[:, :1]], dim=1))  # the last was chosen and not read yet
    with pytest.raises(ValueError, match="19 tokens were given for a cache that has read 20"):
        held.save(tmp_path / "session", ids[:, :19])


def test_a_session_without_its_codec_asks_for_it(tmp_path: Path) -> None:
    model, held = model_of("llama"), cache_of("llama", "spectra")
    run(model, tokens(1, 30), held)
    save_session(held, tmp_path / "small", with_codec=False)
    held.save(tmp_path / "whole")
    sizes = [(tmp_path / name / "tensors.safetensors").stat().st_size for name in ("small", "whole")]
    assert sizes[0] < sizes[1] / 2
    with pytest.raises(ValueError, match="without its codec; give the codec"):
        CompressedCache.load(model, tmp_path / "small")
    spectra, int4 = fitted("llama", "spectra"), fitted("llama", "int4")
    for name in ("small", "whole"):
        with pytest.raises(ValueError, match="was made with the codec") as refused:
            CompressedCache.load(model, tmp_path / name, int4)
        assert f"{spectra.description}; this one is {int4.description}" in str(refused.value)
    assert bits(CompressedCache.load(model, tmp_path / "small", fitted("llama", "spectra"))) == bits(held)


def test_other_weights_are_refused_even_where_one_number_differs(tmp_path: Path) -> None:
    """The sample that identifies a model may miss it; the fingerprint of all weights does not."""
    model, held = model_of("llama"), cache_of("llama", "int4")
    run(model, tokens(1, 30), held)
    held.save(tmp_path / "session")
    other = build("llama")
    weight = other.base_model.layers[1].mlp.up_proj.weight
    before = weights_fingerprint(other)
    assert before == weights_fingerprint(model)
    weight.data[3, 5] += 1e-6
    weight.add_(0)  # written to: what was remembered is out of date
    assert weights_fingerprint(other) != before
    with pytest.raises(ValueError, match="was made with weights"):
        CompressedCache.load(other, tmp_path / "session")
    with pytest.raises(ValueError, match="does not fit the model"):
        CompressedCache.load(model_of("qwen2"), tmp_path / "session")


@pytest.mark.parametrize("name", ["int4", "full"])
def test_a_session_of_another_dtype_is_refused_with_both_named(name: str, tmp_path: Path) -> None:
    """The same values in another dtype have the same fingerprint, and make other logits."""
    model = build("llama").bfloat16()
    held = CompressedCache(model, fitted("llama", name))
    run(model, tokens(1, 30), held)
    held.save(tmp_path / "session", tokens(1, 30))
    bfloat16 = weights_fingerprint(model)
    model.float()
    assert weights_fingerprint(model) == bfloat16
    with pytest.raises(ValueError, match="made by a model in bfloat16, this one is in float32; load the model in bfl"):
        CompressedCache.load(model, tmp_path / "session")
    CompressedCache.load(model.bfloat16(), tmp_path / "session")


def test_the_fingerprint_is_of_values_not_of_dtypes() -> None:
    model = build("llama").bfloat16()
    half = weights_fingerprint(model)
    assert weights_fingerprint(model.float()) == half
    assert weights_fingerprint(build("llama")) != half
    assert tokenizer_fingerprint(object()) == ""


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("layers", 0, "store", "n_coded"), 4, "its planes of keys"),
        (("layers", 0, "store", "n_coded"), -4, "coded"),
        (("layers", 0, "kind"), "DynamicLayer", "it is a DynamicLayer"),
        (("layers", 0, "store"), None, "it has no bytes"),
        (("layers", 0, "attributes"), {"map": [["update", 1]]}, "keeps no 'update'"),
        (("layers",), [], "holds 0 layers"),
        (("weights",), "0", "was made with weights"),
    ],
)  # fmt: skip
def test_a_session_that_is_made_up_is_refused(path: tuple[Any, ...], value: Any, words: str, tmp_path: Path) -> None:
    import hashlib

    model, held, folder = model_of("llama"), cache_of("llama", "int4"), tmp_path / "session"
    run(model, tokens(1, 30), held)
    held.save(folder)
    config = json.loads((folder / CONFIG).read_text())
    at = config["session"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    body = {k: v for k, v in config.items() if k not in ("format", "version", "tensors_sha256", "body_sha256")}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="altered"):
        CompressedCache.load(model, folder)
    config["body_sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        CompressedCache.load(model, folder)


@pytest.mark.parametrize("name", ["int4", "kvtc", "karhunen", "full"])
def test_branches_share_what_they_come_from_and_go_on_by_themselves(name: str) -> None:
    """Ten questions to one document: each answers as a cache of its own would, the document's bytes are held once."""
    model, document = model_of("llama"), cache_of("llama", name)
    run(model, tokens(1, 60), document)
    before = bits(document)
    questions = [tokens(1, 9, seed=20 + i) for i in range(10)]
    branches = [document.branch() for _ in questions]
    for question, branch in zip(questions, branches, strict=True):
        alone = cache_of("llama", name)
        run(model, tokens(1, 60), alone)
        assert torch.equal(run(model, question, branch), run(model, question, alone))
        assert torch.equal(run(model, question, branch), run(model, question, alone))
        assert bits(branch) == bits(alone)
        assert branch.report().total.held >= alone.report().total.held - 200
    assert bits(document) == before
    if name != "full":
        stores = [layer.store.tensors() for branch in branches for layer in branch.coded_layers()]
        shared = [x for held in stores for key, x in held.items() if key.endswith(".shared")]
        assert sum(branch.shared_bytes for branch in branches) == sum(x.nbytes for x in shared) > 0
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in shared}
        assert sum(memory.values()) <= document.report().total.codes + document.report().total.side


@pytest.mark.parametrize("name", ["int4", "kvtc"])
def test_branches_are_cropped_and_reordered_without_harm_to_the_others(name: str) -> None:
    model, document = model_of("llama"), cache_of("llama", name)
    run(model, tokens(1, 60), document)
    before = bits(document)
    branch = document.branch()
    branch.crop(-20)
    branch.batch_repeat_interleave(2)
    assert branch.get_seq_length() == 40
    run(model, tokens(2, 15), branch)
    assert bits(document) == before
    assert branch.shared_bytes == 0
