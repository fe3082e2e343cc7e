"""A compressed cache in the place of transformers' own, on tiny models of many families."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.closeness import assert_near
from tests.hf.tiny import build
from tests.synthetic import measure, seeded
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, pipeline

from karhunen.allocation.uniform import Uniform
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.frames.rope_frame import RopeFrame
from karhunen.hf.cache import CompressedCache, CompressedLayer, dense_cache
from karhunen.hf.compressed import compressed, make_cache
from karhunen.hf.describe import identity_of
from karhunen.hf.probe import cache_argument, updates
from karhunen.hf.rotary import DetectedRotary, detect_rotary
from karhunen.recipe import Recipe
from karhunen.recipes import make
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.need import SLOTS
from karhunen.windows.sink_recent import SinkRecent

WINDOW = SinkRecent(sink=2, recent=8, page_tokens=4)
N_NEW = 12


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def model_of(family: str, **changes: Any) -> Any:
    return build(family, **changes)


def recipe_of(name: str) -> Recipe:
    """By name with a small window; `fine` has 12 bits, whose error no choice of a token depends on."""
    if name == "fine":
        side = replace(make("int8").key, allocation=Uniform(12))
        return Recipe("fine", side, side, WINDOW)
    roomy = {
        "spectra": {"bits": 6.0},
        "kvtc": {"bits": 6.0, "page": 4},
    }  # 24 coefficients leave few bits beside a range
    recipe = make(name, **roomy.get(name, {}))
    return recipe if recipe.key is None else replace(recipe, window=WINDOW)


def codec_of(model: Any, name: str) -> Codec:
    """Fitted to what the model itself caches for random tokens; queries are made up."""
    recipe, identity = recipe_of(name), identity_of(model)
    seen = updates(model, tokens(1, 300, seed=9))
    turns = detect_rotary(model)
    layers = {}
    for index, (key, value) in seen.items():
        if identity.layers[index].kind != "full":
            continue
        layers[index] = measured_layer(recipe, identity.layers[index], key, value, turns[index])
    return fit(recipe, Statistics(identity, layers, ("random",)))


def measured_layer(
    recipe: Recipe, shape: LayerShape, key: Tensor, value: Tensor, turns: DetectedRotary
) -> LayerStatistics:
    """What turns is a recipe's key, also where the cache has it as value."""
    exchanged = LayerStatistics(turns.key, turns.value).turns_in_values
    if exchanged:
        shape, key, value, turns = shape.exchanged(), value, key, DetectedRotary(turns.value, turns.key)
    measured = {n: measure(n, shape, key, value, turns.key) for n in recipe.needs()}
    made = LayerStatistics(turns.key, turns.value, 1.0, 300, measured)
    return made.exchanged() if exchanged else made


@cache
def fitted(family: str, name: str) -> Codec:
    return codec_of(model_of(family), name)


def tokens(b: int, t: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 99, (b, t), generator=seeded(seed))


def cache_of(family: str, name: str) -> CompressedCache:
    return CompressedCache(model_of(family), fitted(family, name))


def run(model: Any, ids: Tensor, held: Any, **arguments: Any) -> Tensor:
    """Logits of one forward into `held`."""
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): held}, **arguments).logits


def generate(model: Any, ids: Tensor, held: Any = None, n: int = N_NEW, **settings: Any) -> list[list[int]]:
    given = {} if held is None else {cache_argument(model): held}
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **settings}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=n, **given, **settings)
    return out[:, ids.shape[1] :].tolist()


def coded_layers(held: CompressedCache) -> list[CompressedLayer]:
    return [layer for layer in held.layers if isinstance(layer, CompressedLayer)]


def bits(held: CompressedCache) -> list[bytes]:
    """All coded bytes of a cache."""
    found = []
    for layer in coded_layers(held):
        for slot in SLOTS:
            if (packed := layer.store.packed(slot)) is not None:
                found += [t.contiguous().view(torch.uint8).numpy().tobytes() for t in packed.tensors()]
    return found


# generation


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "gpt2", "gpt_oss", "mla"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_full_generates_the_tokens_of_the_uncompressed_model(family: str, settings: dict[str, Any]) -> None:
    model, ids = model_of(family), tokens(2, 30)
    assert generate(model, ids, cache_of(family, "full"), **settings) == generate(model, ids, **settings)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_twelve_bits_generate_the_tokens_of_the_uncompressed_model(settings: dict[str, Any]) -> None:
    model, ids, held = model_of("llama"), tokens(2, 40), cache_of("llama", "fine")
    assert generate(model, ids, held, **settings) == generate(model, ids, **settings)
    assert min(layer.store.n_coded for layer in coded_layers(held)) > 20


@pytest.mark.parametrize("name", ["int8", "spectra", "kivi"])
def test_left_padding_changes_nothing(name: str) -> None:
    """Rows of 31 and 4 tokens, padded on the left, get the logits they get alone."""
    model, lengths = model_of("llama"), (31, 4)
    rows = [tokens(1, n, seed=n) for n in lengths]
    padded = torch.cat([torch.nn.functional.pad(r, (31 - r.shape[1], 0)) for r in rows])
    mask = torch.tensor([[0] * (31 - n) + [1] * n for n in lengths])
    settings: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    settings |= {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    held = cache_of("llama", name)
    together = model.generate(padded, attention_mask=mask, **{cache_argument(model): held}, **settings)
    assert held.offsets.now is not None
    assert held.offsets.now.known.tolist() == [0, 27]
    first_row_alone = cache_of("llama", name)
    alone = model.generate(rows[0], **{cache_argument(model): first_row_alone}, **settings)
    assert torch.equal(together.sequences[0], alone.sequences[0])
    layer, layer_alone = coded_layers(held)[0].store, coded_layers(first_row_alone)[0].store
    packed, packed_alone = layer.packed("key"), layer_alone.packed("key")
    assert packed is not None
    assert packed_alone is not None
    assert torch.equal(packed.planes[:1], packed_alone.planes)
    # the short row's window counts its padding, so other tokens are coded than alone: compare with the dense run
    dense = model.generate(padded, attention_mask=mask, **settings)
    kl = divergence(dense.logits[1][1], together.logits[1][1])
    assert kl < {"int8": 1e-3, "spectra": 2.0, "kivi": 2.0}[name]


def divergence(p: Tensor, q: Tensor) -> float:
    """Mean KL(p ‖ q) of logits, in nats."""
    p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_padded_row_is_coded_at_its_own_positions() -> None:
    """A pre-RoPE codec turns each key back by its position, which padding moves."""
    model, row = model_of("llama"), tokens(1, 40)
    pad = 5
    held, alone = cache_of("llama", "spectra"), cache_of("llama", "spectra")
    padded = torch.nn.functional.pad(row, (pad, 0))
    positions = torch.cat([torch.zeros(1, pad).long(), torch.arange(40)[None]], dim=1)
    mask = torch.cat([torch.zeros(1, pad).long(), torch.ones(1, 40).long()], dim=1)
    run(model, padded, held, attention_mask=mask, position_ids=positions)
    run(model, row, alone)
    mine, theirs = held.layers[0].store, alone.layers[0].store
    key, key_alone = mine.read()[0][:, :, pad:], theirs.read()[0]
    coded = slice(WINDOW.sink, WINDOW.sink + theirs.n_coded - pad)
    assert_near(key[:, :, coded], key_alone[:, :, coded], 2e-3)


@pytest.mark.parametrize("n", [1, 9, 10, 11, 13, 14, 15])
@pytest.mark.parametrize("name", ["fine", "kivi"])
def test_a_prompt_of_any_length_works(name: str, n: int) -> None:
    """Around one token, the window (10) and the first page (14)."""
    held, ids = cache_of("llama", name), tokens(1, n)
    assert generate(model_of("llama"), ids, held, n=3)[0][:1] == generate(model_of("llama"), ids, n=1)[0]
    assert held.get_seq_length() == n + 2
    assert held.report().layers[0].n_tokens == n + 2


def test_a_forward_without_tokens_leaves_an_empty_cache() -> None:
    held = cache_of("llama", "int4")
    empty = torch.zeros(1, 2, 0, 12)
    held.update(empty, empty, 0)
    assert held.get_seq_length() == held.report().total.held == 0
    held.update(torch.ones(1, 2, 3, 12), torch.ones(1, 2, 3, 12), 0)
    assert held.get_seq_length() == 3


@pytest.mark.parametrize("name", ["int8", "kivi", "nova_kv", "spectra", "karhunen"])
def test_prefill_in_chunks_stores_the_bytes_of_prefill_at_once(name: str) -> None:
    """The cache gets the same vectors in other portions: the recorded ones of a single dense forward."""
    model = model_of("llama", head_dim=32)
    codec, recorded = codec_of(model, name), updates(model, tokens(1, 80))
    kept = []
    for size in (80, 1, 5, 64):
        held = CompressedCache(model, codec)
        for start in range(0, 80, size):
            for index, (key, value) in recorded.items():
                held.update(key[:, :, start : start + size], value[:, :, start : start + size], index)
        kept.append(bits(held))
    assert kept[0]
    assert all(other == kept[0] for other in kept[1:])


@pytest.mark.parametrize("size", [1, 5, 64])
def test_prefill_in_chunks_gives_nearly_the_logits_of_one_shot(size: int) -> None:
    """Later chunks read coded tokens that one shot still sees exactly; at 8 bits the difference is small."""
    model, ids = model_of("llama"), tokens(1, 80)
    whole = run(model, ids, cache_of("llama", "int8"))[:, -1]
    held = cache_of("llama", "int8")
    parts = [run(model, part, held) for part in ids.split(size, dim=1)]
    assert divergence(whole, parts[-1][:, -1]) < 1e-3


def test_several_turns_on_one_cache() -> None:
    model, first, second = model_of("llama"), tokens(1, 30), tokens(1, 9, seed=1)
    held, dense = cache_of("llama", "fine"), dense_cache(model)
    for got in (held, dense):
        answer = generate(model, first, got)[0]
        got.turn = torch.cat([first, torch.tensor([answer]), second], dim=1)
    assert torch.equal(held.turn, dense.turn)
    assert generate(model, held.turn, held) == generate(model, dense.turn, dense)
    assert held.get_seq_length() == 30 + N_NEW + 9 + N_NEW - 1


def test_assisted_decoding_gives_the_greedy_tokens() -> None:
    model, ids = model_of("llama"), tokens(1, 30)
    assistant = build("llama", num_hidden_layers=1)
    assert generate(model, ids, cache_of("llama", "fine"), assistant_model=assistant) == generate(model, ids)


def test_prompt_lookup_gives_the_greedy_tokens() -> None:
    model, ids = model_of("llama"), tokens(1, 10).repeat(1, 4)
    assert generate(model, ids, cache_of("llama", "fine"), prompt_lookup_num_tokens=3) == generate(model, ids)


# operations on what is coded


def prefilled(name: str, b: int = 1, n: int = 40, family: str = "llama") -> tuple[CompressedCache, Tensor]:
    held, ids = cache_of(family, name), tokens(b, n)
    run(model_of(family), ids, held)
    assert coded_layers(held)[0].store.n_coded > 0
    return held, ids


@pytest.mark.parametrize("removed", [3, 20, 38])
def test_crop_within_and_past_the_window(removed: int) -> None:
    held, ids = prefilled("int8")
    held.crop(-removed)
    assert held.get_seq_length() == 40 - removed
    dense = dense_cache(model_of("llama"))
    run(model_of("llama"), ids[:, : 40 - removed], dense)
    more = tokens(1, 7, seed=5)
    got, want = run(model_of("llama"), more, held), run(model_of("llama"), more, dense)
    assert divergence(want, got) < 1e-3


def test_crop_of_nothing_changes_nothing() -> None:
    held, _ = prefilled("int4")
    before = bits(held)
    held.crop(0)
    assert held.get_seq_length() == 40
    assert bits(held) == before


@pytest.mark.parametrize("name", ["int4", "kivi", "spectra"])
def test_batch_operations_reach_the_coded_part(name: str) -> None:
    held, _ = prefilled(name, b=3, n=60)
    before = held.layers[1].keys.clone()
    held.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(held.layers[1].keys, before[[2, 0, 1]])
    held.batch_select_indices(torch.tensor([1, 2]))
    assert torch.equal(held.layers[1].keys, before[[0, 1]])
    held.batch_repeat_interleave(2)
    assert torch.equal(held.layers[1].keys, before[[0, 0, 1, 1]])
    held.batch_select_indices(torch.tensor([True, False, False, True]))
    assert torch.equal(held.layers[1].keys, before[[0, 1]])
    assert held.layers[1].batch_size == 2
    assert held.report().total.held == held_bytes(held)


def held_bytes(held: CompressedCache) -> int:
    """Bytes of the memory behind every tensor reachable from the cache's layers, once each."""
    storages: dict[int, int] = {}
    for layer in held.layers:
        store = layer.store if isinstance(layer, CompressedLayer) else None
        tensors = store.tensors().values() if store else [v for v in vars(layer).values() if isinstance(v, Tensor)]
        for tensor in tensors:
            if tensor.ndim > 1 and tensor.numel():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_reset_cache_is_used_again() -> None:
    held, ids = prefilled("int8")
    before = bits(held)
    held.reset()
    assert held.get_seq_length() == held.report().total.held == 0
    run(model_of("llama"), ids, held)
    assert bits(held) == before


def test_two_questions_on_one_context() -> None:
    held, _ = prefilled("int8")
    before = bits(held)
    model, questions = model_of("llama"), [tokens(1, 5, seed=s) for s in (1, 2)]
    answers = [run(model, question, deepcopy(held))[:, -1] for question in questions]
    assert bits(held) == before
    assert held.get_seq_length() == 40
    assert torch.equal(run(model, questions[0], deepcopy(held))[:, -1], answers[0])
    assert not torch.equal(answers[0], answers[1])


def test_a_copy_learns_its_own_padding() -> None:
    held, _ = prefilled("spectra", b=2)
    twin = deepcopy(held)
    positions = torch.stack([torch.arange(40, 43), torch.arange(37, 40)])
    run(model_of("llama"), tokens(2, 3), twin, position_ids=positions)
    assert twin.offsets.now is not None
    assert twin.offsets.now.known.tolist() == [0, 3]
    assert held.offsets.now is None


def test_tokens_that_come_one_at_a_time_leave_the_window_all_the_same() -> None:
    """The window is by age, not by call: in a thousand steps it never holds more than `recent` and part of a page."""
    codec = replace(fitted("llama", "int4"), window=SinkRecent(sink=2, recent=8, page_tokens=16))
    held, x = CompressedCache(model_of("llama"), codec), torch.ones(1, 2, 1, 12)
    store = held.layers[0].store
    for _ in range(1000):
        held.update(x, x, 0)
        assert store.exact("key")[1].shape[2] <= 8 + 16 - 1
    assert store.n_tokens == 1000
    assert store.n_coded >= 1000 - 2 - 8 - 16


# families


def test_sliding_layers_stay_exact_past_their_window() -> None:
    """Gemma 3 with a window of 16 and 80 tokens: the report says which layer is what, and logits agree."""
    model, ids = model_of("gemma3"), tokens(1, 80)
    held = cache_of("gemma3", "fine")
    dense = dense_cache(model)
    for part in ids.split(20, dim=1):
        got, want = run(model, part, held), run(model, part, dense)
    assert divergence(want, got) < 1e-3
    rows = held.report().layers
    assert [row.kind for row in rows] == ["sliding", "sliding", "full"]
    assert [bool(row.reason) for row in rows] == [True, True, False]
    assert "16 tokens" in rows[0].reason
    assert rows[2].n_coded > 60
    assert held.report().total.held == held_bytes(held)
    assert torch.equal(held.layers[0].keys, dense.layers[0].keys), "the first layer sees nothing coded"
    assert generate(model, ids, cache_of("gemma3", "fine")) == generate(model, ids)


FAMILIES = {
    "qwen3_next": ["other", "full"],
    "lfm2": ["other", "full"],
    "falcon_h1": ["other", "other"],
    "gpt_oss": ["sliding", "full"],
    "gemma3n": ["sliding", "full", "other", "other"],
    "gemma4": ["sliding", "full", "other", "other"],
    "mla": ["full", "full"],
    "qwen2": ["full", "full"],
    "qwen3": ["full", "full"],
    "phi": ["full", "full"],
    "gpt2": ["full", "full"],
    "smollm3": ["full", "full", "full", "full"],
}


def test_the_report_counts_what_a_sliding_layer_keeps_alive_after_a_long_prompt() -> None:
    held = cache_of("gemma3", "int8")
    run(model_of("gemma3"), tokens(1, 80), held)
    assert held.report().total.held == held_bytes(held)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_coded_or_listed_with_the_reason(family: str) -> None:
    model, ids = model_of(family), tokens(1, 60)
    held, dense = cache_of(family, "fine"), dense_cache(model)
    for part in ids.split([40, 19, 1], dim=1):
        got, want = run(model, part, held), run(model, part, dense)
    assert divergence(want[:, -1], got[:, -1]) < 1e-3
    rows = held.report().layers
    assert [row.kind for row in rows] == FAMILIES[family]
    for row in rows:
        assert (row.n_coded > 40) == (not row.reason), row
        assert row.kind == "full" or row.reason, row


@pytest.mark.parametrize("block_tokens", [1, 16])
@pytest.mark.parametrize("family", ["llama_yarn", "llama_dynamic", "gpt_neox", "gptj", "glm", "smollm3", "qwen3"])
def test_block_relative_keys_follow_every_kind_of_rotation(family: str, block_tokens: int) -> None:
    """The frame is exact, so at a high rate the logits are those of the dense run: scaled, partial, interleaved."""
    model, ids, fine = model_of(family), tokens(1, 90), recipe_of("fine")
    assert fine.key is not None
    recipe = replace(fine, key=replace(fine.key, frame=RopeFrame(block_tokens)))
    held, dense = CompressedCache(model, at_rate(model, recipe)), dense_cache(model)
    for part in ids.split([60, 29, 1], dim=1):
        got, want = run(model, part, held), run(model, part, dense)
    assert coded_layers(held)[0].store.n_coded > 60
    assert divergence(want[:, -1], got[:, -1]) < 1e-4


def at_rate(model: Any, recipe: Recipe) -> Codec:
    recipe, identity, turns = replace(recipe, window=WINDOW), identity_of(model), detect_rotary(model)
    layers = {}
    for index, (key, value) in updates(model, tokens(1, 300, seed=9)).items():
        layers[index] = measured_layer(recipe, identity.layers[index], key, value, turns[index])
    return fit(recipe, Statistics(identity, layers))


def test_a_pre_rope_recipe_is_refused_where_nothing_rotates() -> None:
    with pytest.raises(
        ValueError, match=r"'spectra' codes keys relative to their rotation .* gpt2 .* codes keys as they are cached"
    ):
        codec_of(model_of("gpt2"), "spectra")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_float_dtype_is_kept(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    held = CompressedCache(model, codec_of(model, "int8"))
    dense = dense_cache(model)
    for part in tokens(1, 50).split([40, 10], dim=1):
        got, want = run(model, part, held), run(model, part, dense)
    assert got.dtype == held.layers[0].keys.dtype == dtype
    assert divergence(want, got) < 5e-3
    assert held.report().total.dense == 50 * 2 * 2 * 2 * 12 * dtype.itemsize


def test_exact_tokens_may_be_held_in_bfloat16_while_the_model_computes_in_float32() -> None:
    model = model_of("llama")
    held = CompressedCache(model, codec_of(model, "int8"), exact_dtype=torch.bfloat16)
    dense = dense_cache(model)
    for part in tokens(1, 50).split([40, 10], dim=1):
        got, want = run(model, part, held), run(model, part, dense)
    assert got.dtype == torch.float32
    assert divergence(want, got) < 5e-3
    stored = held.layers[0].store.tensors()
    assert {x.dtype for name, x in stored.items() if name.startswith("exact")} == {torch.bfloat16}
    assert held.report().total.dense == 50 * 2 * 2 * 2 * 12 * 2, "the uncompressed cache is counted in the same type"


def test_bytes_do_not_depend_on_autocast() -> None:
    key = torch.randn(1, 2, 50, 12, generator=seeded(3))
    kept = []
    for enabled in (False, True):
        held = cache_of("llama", "spectra")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            held.update(key, key, 0)
            dense = held.layers[0].keys
        kept.append((bits(held), dense))
    assert kept[0][0] == kept[1][0] != []
    assert torch.equal(kept[0][1], kept[1][1])


def test_a_model_runs_under_autocast() -> None:
    model, held = model_of("llama"), cache_of("llama", "spectra")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for part in tokens(1, 50).split([40, 10], dim=1):
            logits = run(model, part, held)
    assert torch.isfinite(logits).all()
    assert held.report().total.held == held_bytes(held)


def test_a_cache_keeps_no_graph_alive() -> None:
    model, held = model_of("llama"), cache_of("llama", "int4")
    with torch.enable_grad():
        for part in tokens(1, 50).split([40, 10], dim=1):
            logits = run(model, part, held)
    assert logits.requires_grad
    assert not any(tensor.requires_grad for tensor in held.layers[0].store.tensors().values())
    assert not held.layers[0].keys.requires_grad


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_any_attention_implementation_works(attention: str) -> None:
    model = build("llama", attn_implementation=attention)
    held = CompressedCache(model, codec_of(model, "fine"))
    assert generate(model, tokens(1, 40), held) == generate(model_of("llama"), tokens(1, 40))


def test_an_outlier_and_an_equal_vector_stay_finite() -> None:
    held = cache_of("llama", "int4")
    x = torch.ones(1, 2, 40, 12).bfloat16()
    x[0, 0, 10, 3], x[0, 1, 12] = 1e5, 0
    held.update(x, x, 0)
    key = held.layers[0].keys
    assert torch.isfinite(key).all()
    assert torch.equal(key[0, 1, 12], x[0, 1, 12])
    assert torch.equal(key[0, 0, 13], x[0, 0, 13])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_the_keys_is_refused_with_the_reason(bad: float) -> None:
    held = cache_of("llama", "int4")
    x = torch.ones(1, 2, 40, 12)
    x[0, 0, 10, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity among the vectors to be coded"):
        held.update(x, torch.ones_like(x), 0)


# the context manager


def marks(model: Any) -> Any:
    """Attributes and hooks of a model and of all its modules."""
    hooks = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    return [
        (name, sorted(vars(module)), [dict(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    ]


def test_the_context_gives_every_call_a_compressed_cache_and_leaves_no_mark() -> None:
    model, ids = model_of("llama"), tokens(1, 40)
    before = marks(model)
    with compressed(model, fitted("llama", "fine")) as session:
        inside = generate(model, ids)
        kept = model.generate(
            ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True
        )
        generate(model, ids, n=2)
        assert session.report().total.codes > 0
        assert session.report().layers[0].n_tokens == 41
    assert isinstance(kept.past_key_values, CompressedCache)
    assert marks(model) == before
    assert inside == generate(model, ids)


def test_the_context_leaves_no_mark_after_an_error() -> None:
    model = model_of("llama")
    before = marks(model)
    with suppress(KeyError), compressed(model, fitted("llama", "int8")):
        generate(model, tokens(1, 20), n=2)
        raise KeyError
    assert marks(model) == before


def test_contexts_nest() -> None:
    model, ids = model_of("llama"), tokens(1, 40)
    before = marks(model)
    with compressed(model, fitted("llama", "int8")) as outer:
        with compressed(model, fitted("llama", "int4")) as inner:
            generate(model, ids, n=2)
        assert inner.report().recipe == "int4"
        generate(model, ids, n=2)
        assert outer.report().recipe == "int8"
    assert marks(model) == before


def test_no_cache_given_by_name_is_no_cache_given() -> None:
    model = model_of("llama")
    with compressed(model, fitted("llama", "int8")) as session:
        generate(model, tokens(1, 40), n=2, past_key_values=None)
        assert session.report().total.codes > 0


def test_a_cache_of_the_caller_is_left_alone() -> None:
    model, own = model_of("llama"), DynamicCache()
    with compressed(model, fitted("llama", "int8")) as session:
        generate(model, tokens(1, 40), own, n=2)
        with pytest.raises(ValueError, match="nothing was generated"):
            session.report()
    assert own.get_seq_length() == 41


@pytest.mark.parametrize("how", ["argument", "configuration"])
def test_another_cache_implementation_is_refused(how: str) -> None:
    asked = {"cache_implementation": "static"}
    settings = asked if how == "argument" else {"generation_config": GenerationConfig(**asked)}
    with (
        compressed(model_of("llama"), fitted("llama", "int8")),
        pytest.raises(ValueError, match="cache_implementation asks for another cache"),
    ):
        generate(model_of("llama"), tokens(1, 20), **settings)


def test_a_plain_forward_inside_the_context_is_compressed_too() -> None:
    model = model_of("llama")
    with compressed(model, fitted("llama", "int8")) as session:
        out = model(input_ids=tokens(1, 40), use_cache=True)
        assert isinstance(out.past_key_values, CompressedCache)
        assert session.report().total.codes > 0


def test_a_pipeline_works_inside_the_context() -> None:
    model, words = model_of("llama"), [f"w{i}" for i in range(99)]
    vocabulary = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    vocabulary.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="w0", eos_token="w1")
    text = " ".join(words[3:43])
    before = marks(model)
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=1)
    with compressed(model, fitted("llama", "fine")) as session:
        inside = ask(text, generation_config=settings)
        assert session.report().layers[0].n_coded > 20
    assert marks(model) == before
    assert inside == ask(text, generation_config=settings)


def test_a_codec_of_another_model_is_refused_with_the_reason() -> None:
    codec = fitted("llama", "int4")
    with pytest.raises(ValueError, match="does not fit the model: it was made for a llama, this model is a gpt2"):
        CompressedCache(model_of("gpt2"), codec)
    wider = build("llama", num_key_value_heads=4)
    with pytest.raises(ValueError, match="layer 0 differs: made for "), compressed(wider, codec):
        pass
    other = build("llama")
    other.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    with pytest.raises(ValueError, match="it was made for weights"):
        make_cache(other, codec)


def test_a_dropped_cache_stops_watching_the_model() -> None:
    model = model_of("llama")
    gc.collect()
    before = marks(model)
    held = cache_of("llama", "int4")
    assert marks(model) != before
    del held
    gc.collect()
    assert marks(model) == before


# memory

LONG = 2000
WIDE = {"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 32, "max_position_embeddings": 4096}


@cache
def long_model() -> Any:
    return model_of("llama", **WIDE)


def test_the_memory_behind_every_tensor_confirms_the_saving() -> None:
    """What the report says is what a walk over the tensors alive in the process finds."""
    model, codec = long_model(), codec_of(long_model(), "int4")
    before = alive()
    held = CompressedCache(model, codec)
    run(model, tokens(1, LONG), held)
    gc.collect()
    grown = alive() - before
    report = held.report()
    assert report.total.dense == LONG * 4 * 2 * 2 * 32 * 4
    assert report.total.held == held_bytes(held)
    assert abs(grown - report.total.held) <= 0.02 * report.total.held
    assert report.total.ratio > 5


def alive() -> int:
    """Bytes of the distinct storages of all tensors alive."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, torch.nn.Parameter) and not item.is_meta:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


def test_memory_falls_layer_by_layer_during_prefill() -> None:
    """When layer k runs, the layers before it hold codes: no dense cache of all layers ever exists."""
    model, held = long_model(), CompressedCache(long_model(), codec_of(long_model(), "int4"))
    sizes: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_: sizes.append(held.report().total.held))
        for layer in model.model.layers
    ]
    try:
        run(model, tokens(1, LONG), held)
    finally:
        for hook in hooks:
            hook.remove()
    dense_of_one = LONG * 2 * 2 * 32 * 4
    assert sizes[0] == 0
    assert all(0 < b - a < 0.2 * dense_of_one for a, b in pairwise(sizes))
