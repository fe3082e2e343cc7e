"""`generate` over a store of pages: the longest whole prefix is restored, the rest read, what is new stored."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.test_cache import codec_of, fitted, generate, model_of, run, tokens
from tests.hf.tiny import build

from karhunen.hf.cache import dense_cache
from karhunen.hf.describe import identity_of
from karhunen.hf.prefix_cache import PrefixCache
from karhunen.stores import DirectoryStore, MemoryStore, RedisStore
from karhunen.stores.base import Store

PAGE = 16
SETTINGS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 8}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def over(store: Store, family: str = "llama", name: str = "full") -> PrefixCache:
    return PrefixCache(model_of(family), fitted(family, name), store, page_tokens=PAGE)


def said(prefix: PrefixCache, ids: torch.Tensor, **settings: Any) -> list[list[int]]:
    return prefix.generate(ids, **{**SETTINGS, **settings})[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mla", "qwen2", "lfm2", "qwen3_next", "gpt2"])
def test_a_restored_prefix_generates_what_reading_it_generates(family: str) -> None:
    """Exact pages, so token for token; models whose layers forget tokens have their states stored as well."""
    store, ids = MemoryStore(), tokens(1, 60)
    plain = generate(model_of(family), ids, n=8)
    first = over(store, family)
    assert said(first, ids) == plain
    assert first.last is not None
    assert (first.last.n_restored, first.last.n_prompt) == (0, 60)
    assert first.last.n_pages_stored == (3 if first.stateful else 4)
    again = over(store, family)
    assert said(again, ids) == plain
    assert again.last is not None
    assert again.last.n_restored == 48
    assert again.last.reason == ""
    counts = again.store.counts
    assert (counts.hits, counts.misses, counts.refusals, counts.failures) == (3 + bool(again.stateful), 0, 0, 0)
    assert counts.bytes_read > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_two_texts_share_exactly_the_pages_of_their_common_beginning(family: str) -> None:
    store = MemoryStore()
    one, other = tokens(1, 60), torch.cat([tokens(1, 40), tokens(1, 30, seed=8)], dim=1)
    said(over(store, family), one)
    prefix = over(store, family)
    got = said(prefix, other)
    assert got == generate(model_of(family), other, n=8)
    assert prefix.last is not None
    if family == "llama":
        assert prefix.last.n_restored == 32
        assert prefix.last.reason == "page 2 of 4 is not in the store"
    else:  # the state lies at 48 tokens, where the texts differ already
        assert prefix.last.n_restored == 0
        assert "no state of theirs is stored" in prefix.last.reason
    assert said(prefix, other) == got
    assert prefix.last.n_restored == 64


def test_what_was_generated_is_stored_too_and_a_chat_reads_only_its_new_message() -> None:
    prefix = over(MemoryStore())
    ids = tokens(1, 33)
    answer = prefix.generate(ids, **{**SETTINGS, "max_new_tokens": 20})
    longer = torch.cat([answer, tokens(1, 10, seed=4)], dim=1)
    assert said(prefix, longer) == generate(model_of("llama"), longer, n=8)
    assert prefix.last is not None
    assert prefix.last.n_restored == 48


@pytest.mark.parametrize("name", ["int4", "karhunen", "kivi", "spectra"])
def test_pages_of_codes_restore_what_a_codec_decodes(name: str) -> None:
    """Smaller than exact pages; a page is coded once, whoever restores it."""
    family, ids = "llama", tokens(1, 60)
    exact, coded = MemoryStore(), MemoryStore()
    said(PrefixCache(model_of(family), fitted(family, "full"), exact, page_tokens=32), ids, max_new_tokens=2)
    prefix = PrefixCache(model_of(family), fitted(family, name), coded, page_tokens=32)
    said(prefix, ids, max_new_tokens=2)
    assert coded.n_bytes < exact.n_bytes * 0.6
    before = dict(coded._held)
    said(prefix, ids, max_new_tokens=2)
    assert prefix.last is not None
    assert (prefix.last.n_restored, prefix.last.n_pages_stored) == (32, 0)
    assert dict(coded._held) == before
    cache, n, _ = prefix.restore(ids[0].tolist())
    assert n == cache.get_seq_length() == 32


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_damaged_page_is_a_miss_that_is_counted_and_replaced(family: str, tmp_path: Path) -> None:
    store, ids = DirectoryStore(tmp_path), tokens(1, 60)
    plain = generate(model_of(family), ids, n=8)
    prefix = over(store, family)
    said(prefix, ids)
    damaged = store.keys()[1] if family == "llama" else prefix.keys(ids[0].tolist())[1]
    data = bytearray(store.get(damaged) or b"")
    data[len(data) // 2] ^= 1
    store.put(damaged, bytes(data))
    fresh = over(store, family)
    assert said(fresh, ids) == plain
    assert fresh.last is not None
    assert fresh.last.n_restored == (16 if family == "llama" else 0)
    assert fresh.store.counts.refusals == 1
    assert "checksum" in fresh.store.counts.last_reason
    assert "checksum" in fresh.last.reason, "why no more was restored"
    assert said(fresh, ids) == plain
    assert fresh.last.n_restored == 48


def test_pages_behind_a_missing_one_stay_as_they_were_made() -> None:
    """Those were coded from exact vectors; what is read after a decoded prefix must not take their place."""
    store, ids = MemoryStore(), tokens(1, 60)
    prefix = over(store, name="int4")
    said(prefix, ids, max_new_tokens=1)
    keys = prefix.keys(ids[0].tolist())
    behind = {key: store.get(key) for key in keys[2:] if store.has(key)}
    assert behind
    store.remove(keys[1])
    said(prefix, ids, max_new_tokens=1)
    assert prefix.last is not None
    assert prefix.last.n_restored == PAGE
    assert prefix.last.n_pages_stored == 1
    assert {key: store.get(key) for key in behind} == behind
    assert store.has(keys[1])


def test_a_missing_page_or_state_is_never_half_a_hit() -> None:
    store, ids = MemoryStore(), tokens(1, 60)
    prefix = over(store, "gemma3")
    plain = said(prefix, ids)
    keys = prefix.keys(ids[0].tolist())
    store.remove(keys[0])
    assert said(prefix, ids) == plain
    assert prefix.last is not None
    assert prefix.last.n_restored == 0
    assert "page 0 of 3 is not in the store" in prefix.last.reason
    store.remove(f"{keys[2]}-state")
    assert prefix.restore(ids[0].tolist())[1] == 0


def test_another_model_or_codec_finds_nothing_in_the_same_store() -> None:
    store, ids = MemoryStore(), tokens(1, 60)
    said(over(store), ids)
    other = build("llama")
    other.base_model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-4
    for model, name in ((model_of("llama"), "int4"), (other, "full")):
        prefix = PrefixCache(model, codec_of(model, name), store, page_tokens=PAGE)
        said(prefix, ids)
        assert prefix.last is not None
        assert prefix.last.n_restored == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_dtype_of_the_same_weights_finds_nothing_and_is_refused(family: str) -> None:
    """The fingerprint of the weights is the same, so the dtype has to tell; with states too."""
    from karhunen.hf.fingerprint import weights_fingerprint
    from karhunen.hf.states import restore_state

    store, ids, model = MemoryStore(), tokens(1, 60), build(family).bfloat16()
    codec = codec_of(model.float(), "int4")
    half = PrefixCache(model.bfloat16(), codec, store, page_tokens=PAGE)
    half.generate(ids, **SETTINGS)
    theirs, weights = half.keys(ids[0].tolist()), weights_fingerprint(model)
    whole = PrefixCache(model.float(), codec, store, page_tokens=PAGE)
    assert weights_fingerprint(model) == weights
    assert set(whole.keys(ids[0].tolist())).isdisjoint(theirs)
    whole.generate(ids, **SETTINGS)
    assert whole.last is not None
    assert whole.last.n_restored == 0
    with pytest.raises(ValueError, match="a page of bfloat16, not of float32"):
        whole.pages.open(store.get(theirs[0]) or b"")
    if family == "gemma3":
        with pytest.raises(ValueError, match="a state of bfloat16, not of float32"):
            restore_state(whole.pages, store.get(f"{theirs[2]}-state") or b"", {}, 48, torch.device("cpu"))


def test_what_is_to_be_kept_is_asked_for_in_one_question() -> None:
    """A question for each page of a long prompt is as many round trips to a server."""
    store, asked = MemoryStore(), list[int]()
    has_many = store.has_many

    def counted(keys: Any) -> list[bool]:
        asked.append(len(keys))
        return has_many(keys)

    store.has = store.get = lambda key: pytest.fail(f"{key} is asked for alone")  # type: ignore[method-assign]
    store.has_many = counted  # type: ignore[method-assign]
    prefix = over(store)
    cache = dense_cache(prefix.model)
    ids = tokens(1, 5 * PAGE)
    with torch.no_grad():
        run(prefix.model, ids, cache)
    assert prefix.keep(ids[0].tolist(), cache) == 5
    assert prefix.keep(ids[0].tolist(), cache) == 0
    assert asked == [5, 5]


def test_vectors_that_cannot_be_coded_cost_nothing_but_the_hit() -> None:
    model = build("llama")
    model.base_model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    codec = replace(fitted("llama", "int4"), model=identity_of(model))
    prefix = PrefixCache(model, codec, MemoryStore(), page_tokens=PAGE)
    ids = tokens(1, 40)
    assert prefix.generate(ids, **SETTINGS).shape == (1, 48)
    assert prefix.store.counts.failures == 1
    assert "NaN" in prefix.store.counts.last_reason


def test_a_store_that_is_away_costs_reading_and_nothing_else() -> None:
    ids = tokens(1, 40)
    prefix = over(RedisStore("redis://127.0.0.1:1/0", socket_connect_timeout=0.2))
    assert said(prefix, ids) == generate(model_of("llama"), ids, n=8)
    assert prefix.store.counts.failures > 0
    assert "ConnectionError" in prefix.store.counts.last_reason
    assert prefix.last is not None
    assert "the store failed: ConnectionError" in prefix.last.reason


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 33])
def test_prompts_about_a_page_long(n: int) -> None:
    """A token is always left to be read."""
    store, ids = MemoryStore(), tokens(1, n)
    plain = generate(model_of("llama"), ids, n=8)
    prefix = over(store)
    assert said(prefix, ids) == plain
    assert said(prefix, ids) == plain
    assert prefix.last is not None
    assert prefix.last.n_restored == (n - 1) // PAGE * PAGE


def test_beams_restore_and_store_the_prompt() -> None:
    store, ids = MemoryStore(), tokens(1, 40)
    plain = generate(model_of("llama"), ids, n=8, num_beams=3)
    prefix = over(store)
    assert said(prefix, ids, num_beams=3) == plain
    assert said(prefix, ids, num_beams=3) == plain
    assert prefix.last is not None
    assert prefix.last.n_restored == 32


def test_a_model_none_of_whose_layers_has_pages_gets_no_hit_and_the_reason() -> None:
    """Attention and a recurrent state in one layer: its tokens are not all there is."""
    prefix, ids = over(MemoryStore(), "falcon_h1"), tokens(1, 40)
    for _ in range(2):
        assert said(prefix, ids) == generate(model_of("falcon_h1"), ids, n=8)
        assert prefix.last is not None
        assert prefix.last.n_restored == 0
        assert "keeps all tokens and nothing else" in prefix.last.reason
    assert prefix.store.counts.puts == 0


def test_what_is_no_single_text_is_refused() -> None:
    prefix = over(MemoryStore())
    with pytest.raises(ValueError, match="one text"):
        prefix.generate(tokens(2, 20))
    with pytest.raises(ValueError, match="padding"):
        prefix.generate(tokens(1, 20), attention_mask=torch.tensor([[0] + [1] * 19]))
    with pytest.raises(ValueError, match="makes its own"):
        prefix.generate(tokens(1, 20), cache_implementation="static")
    with pytest.raises(ValueError, match="multiple of 32"):
        PrefixCache(model_of("llama"), fitted("llama", "kivi"), MemoryStore(), page_tokens=16)
