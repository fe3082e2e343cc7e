"""What does not go together is refused before a request is taken, with the reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.serving.stand_in import (
    BLOCK,
    FULL,
    SLIDING,
    WINDOW,
    MambaSpec,
    MLAAttentionSpec,
    cache_config,
    codec_of,
    engine_config,
    plan_of,
    spec,
)

from karhunen.serving.page_names import HeadShard
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm.startup import check_engine, check_model, layer_index, plan, recent_tokens
from karhunen.statistics.identity import LayerShape

SETTINGS = ServingSettings("codec", "store")


def test_the_engine_it_was_made_for() -> None:
    check_engine("0.32.0", engine_config())


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0", "0.3.2"])
def test_another_release_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"made for vLLM 0\.32\.x and this is"):
        check_engine(version, engine_config())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "recompute"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallel"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallel"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallel"),
        ({"model_config__hf_overrides": {"rope_theta": 1}}, "hf-overrides"),
        ({"load_config__load_format": "dummy"}, "no weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_way_to_run_that_pages_cannot_follow_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_engine("0.32.0", engine_config(**changes))


def test_groups_pages_and_heads() -> None:
    made = plan_of(FULL, SLIDING, FULL)
    assert [(g.layers, g.block_tokens, g.window) for g in made.layout.groups] == [
        ((0, 2), BLOCK, None), ((1,), BLOCK, WINDOW),
    ]  # fmt: skip
    assert (made.layout.page_tokens, made.shard, made.layout.is_windowed) == (BLOCK, HeadShard(), True)
    assert plan_of(FULL, recipe="kivi").layout.page_tokens == 32  # kivi codes 32 tokens together
    assert plan_of(FULL, page_tokens=4 * BLOCK).layout.page_tokens == 4 * BLOCK


@pytest.mark.parametrize(
    ("n_ranks", "n_heads", "wanted"),
    [
        (1, 3, [(0, 1, True)]),
        (2, 2, [(0, 2, True), (1, 2, True)]),
        (4, 2, [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]),
    ],
)  # fmt: skip
def test_heads_are_split_as_the_engine_splits_them(n_ranks: int, n_heads: int, wanted: list[Any]) -> None:
    got = [HeadShard.of_rank(rank, n_ranks, n_heads) for rank in range(n_ranks)]
    assert [(shard.index, shard.count, shard.writes) for shard in got] == wanted


def test_heads_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(ValueError, match="not split evenly"):
        HeadShard.of_rank(0, 2, 3)


REFUSED: dict[str, tuple[Any, tuple[LayerShape, ...], str]] = {
    "state": ((MambaSpec(block_size=BLOCK, dtype=torch.float32), [0]), (FULL,), "keeps a state"),
    "latent": ((MLAAttentionSpec(block_size=BLOCK, dtype=torch.float32), [0]), (FULL,), "latent"),
    "hybrid manager off": ((spec(FULL, sliding_window=64), [0]), (FULL,), "disable-hybrid-kv-cache-manager"),
    "float8 cache": ((spec(FULL, dtype=torch.float8_e4m3fn), [0]), (FULL,), "kv-cache-dtype auto"),
    "quantized cache": ((spec(FULL, kv_quant_mode=2), [0]), (FULL,), "kv-cache-dtype auto"),
    "other heads": ((spec(FULL, num_kv_heads=4), [0]), (FULL,), "made for another model"),
    "other size": ((spec(FULL, head_size=64), [0]), (FULL,), "made for another model"),
    "other window": ((spec(SLIDING, sliding_window=64), [0]), (SLIDING,), "made for another model"),
    "fewer layers": ((spec(FULL), [0]), (FULL, FULL), "made for another model"),
    "more layers": ((spec(FULL), [0, 1]), (FULL,), "made for another model"),
    "a layer twice": ((spec(FULL), [0, 0]), (FULL,), "draft models"),
    "no full layer": ((spec(SLIDING), [0]), (SLIDING,), "keeps all its tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_cache_that_pages_cannot_hold_is_refused(what: str) -> None:
    group, shapes, words = REFUSED[what]
    codec = codec_of(FULL, *shapes[1:])
    codec = replace(codec, model=replace(codec.model, layers=shapes))
    with pytest.raises(ValueError, match=words):
        plan(engine_config(), cache_config(group), SETTINGS, codec)


def test_as_many_tokens_are_read_as_the_codec_keeps_exact() -> None:
    codec = codec_of(FULL)
    assert recent_tokens(SETTINGS, codec) == codec.window.recent == 20  # type: ignore[attr-defined]
    assert recent_tokens(replace(SETTINGS, recent_tokens=0), codec) == 0


def test_page_lengths_that_cut_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of the engine's block"):
        plan_of(FULL, page_tokens=BLOCK + 8)


def test_codecs_that_code_heads_together_are_not_split() -> None:
    with pytest.raises(ValueError, match="coded over all heads at once"):
        plan_of(FULL, recipe="spectra", ranks=2)


def test_codecs_of_another_model_are_refused() -> None:
    codec = codec_of(FULL)
    own = codec.model
    check_model(codec, own.architecture, own.config_hash, own.weights_hash)
    for changed in range(3):
        values = [own.architecture, own.config_hash, own.weights_hash]
        values[changed] = "other"
        with pytest.raises(ValueError, match="does not fit the model"):
            check_model(codec, *values)


@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.mixer.1.attn"])
def test_layers_without_a_number_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has no number"):
        layer_index(name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"codec": "a", "store": "b", "page_token": 3}, "unknown setting"),
        ({"store": "b"}, "needs `codec`"),
        ({"codec": "a", "store": ""}, "needs `store`"),
        ({"codec": "a", "store": "b", "page_tokens": 0}, "whole number above 0"),
        ({"codec": "a", "store": "b", "max_queued_bytes": "1G"}, "whole number above 0"),
        ({"codec": "a", "store": "b", "lookup_seconds": -1}, "in seconds"),
        ({"codec": "a", "store": "b", "recent_tokens": -1}, "whole number from 0 on"),
        ({"codec": "a", "store": "b", "accuracy_every": -1}, "whole number from 0 on"),
        ({"codec": "a", "store": "b", "coding_share": 0}, "share above 0"),
        ({"codec": "a", "store": "b", "coding_share": 2.5}, "at most 1"),
    ],
    ids=str,
)
def test_settings_are_strict(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServingSettings.from_dict(data)
