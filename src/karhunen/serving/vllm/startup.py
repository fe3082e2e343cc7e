"""What is settled, and refused, before the engine takes a request: can this engine, model and codec go together?

Everything is read from the engine's configuration objects by name, so that it can be tried without an engine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from karhunen.codec import Codec
from karhunen.pages import PageCodec
from karhunen.serving.page_names import HeadShard, PageNames
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm.layout import EngineLayout, Group
from karhunen.statistics.identity import LayerShape, ModelIdentity
from karhunen.windows.sink_recent import SinkRecent

ENGINES = ("0.32",)
"""Releases of vLLM whose connector interface this was run against."""


@final
@dataclass(frozen=True)
class Plan:
    """What both halves work by."""

    settings: ServingSettings
    codec: Codec
    layout: EngineLayout
    shard: HeadShard
    dtype: torch.dtype
    names_of_layers: dict[int, str]

    def page_codec(self, weights: str) -> PageCodec:
        """For this rank's heads and a model of this fingerprint."""
        return PageCodec(self.codec, self.dtype, weights, shard=(self.shard.index, self.shard.count))

    def page_names(self, weights: str) -> PageNames:
        """For all ranks."""
        return PageNames.of(PageCodec(self.codec, self.dtype, weights), self.layout.page_tokens)


def check_engine(version: str, config: Any) -> None:
    """ValueError, with the reason, for an engine or a way to run it that karhunen cannot serve."""
    if ".".join(version.split(".")[:2]) not in ENGINES:
        raise ValueError(
            f"karhunen was made for vLLM {', '.join(f'{engine}.x' for engine in ENGINES)} and this is {version}; "
            "its connector interface changes between releases"
        )
    transfer, parallel, model = config.kv_transfer_config, config.parallel_config, config.model_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a page that is gone would fail its "
            'request; put "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallel"),
        ("decode_context_parallel_size", "decode context parallel"),
        ("prefill_context_parallel_size", "prefill context parallel"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"{what} splits layers or tokens between ranks, and a page holds all of them; use 1")
    if getattr(model, "hf_overrides", None):
        raise ValueError("--hf-overrides changes the model after its codec was made; leave it out")
    if str(getattr(config.load_config, "load_format", "auto")) == "dummy":
        raise ValueError("--load-format dummy has no weights, so pages cannot say whose they are")


def check_model(codec: Codec, architecture: str, config_hash: str, weights_hash: str) -> None:
    """ValueError if the codec was made for another model than these files are of."""
    codec.check_model(ModelIdentity(architecture, config_hash, weights_hash, codec.model.layers))


def plan(config: Any, cache: Any, settings: ServingSettings, codec: Codec) -> Plan:
    """How the engine keeps the codec's layers; ValueError, with the reason, where pages cannot hold them."""
    ranks: int = config.parallel_config.tensor_parallel_size
    names, specs, groups = _groups(cache)
    dtypes = {spec.dtype for spec in specs.values()}
    if len(dtypes) != 1 or any(_quantized(spec) for spec in specs.values()):
        raise ValueError(
            f"the engine keeps its cache in {sorted(map(str, dtypes))}, coded by its own means; karhunen codes "
            "vectors: use --kv-cache-dtype auto"
        )
    heads = {shape.n_kv_heads for shape in codec.model.layers if shape.kind in ("full", "sliding")}
    if len(heads) > 1 and ranks > 1:
        raise ValueError(f"layers with {sorted(heads)} KV heads are not split over {ranks} ranks; use one rank")
    shard = HeadShard.of_rank(config.parallel_config.rank % ranks, ranks, max(heads, default=1))
    _check_layers(codec, specs, shard)
    whole = [group.block_tokens for group in groups if group.window is None]
    if not whole:
        raise ValueError("no layer of this model keeps all its tokens, so there is nothing that pages could hold")
    block = math.lcm(*(group.block_tokens for group in groups))
    page_tokens = settings.page_tokens or math.lcm(block, _granule(codec))
    if page_tokens % block:
        raise ValueError(f"page_tokens={page_tokens} is no multiple of the engine's block of {block} tokens")
    made = Plan(settings, codec, EngineLayout(tuple(groups), page_tokens), shard, dtypes.pop(), names)
    made.page_codec("").page_bytes(page_tokens)  # refuses lengths, windows and shards that make no pages
    return made


def recent_tokens(settings: ServingSettings, codec: Codec) -> int:
    """How many tokens at a prompt's end are read in any case."""
    if settings.recent_tokens is not None:
        return settings.recent_tokens
    return codec.window.recent if isinstance(codec.window, SinkRecent) else 0


def layer_index(name: str) -> int:
    """Of a layer's name in the engine; ValueError for one that does not say."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ValueError(f"the layer {name} has no number of its own; karhunen does not know whose codec is for it")
    return int(numbers[0])


def _granule(codec: Codec) -> int:
    return math.lcm(1, *(layer.granule_tokens for layer in codec.layers.values()))


def _groups(cache: Any) -> tuple[dict[int, str], dict[int, Any], list[Group]]:
    """(names, specs) by layer, and the groups, of the engine's cache."""
    names: dict[int, str] = {}
    specs: dict[int, Any] = {}
    groups: list[Group] = []
    for group in cache.kv_cache_groups:
        layers: list[int] = []
        windows: set[int | None] = set()
        for name in group.layer_names:
            spec = group.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {name: spec}).get(name, spec)
            index = layer_index(name)
            if index in names:
                raise ValueError(f"{names[index]} and {name} are both layer {index}; draft models are not served")
            names[index], specs[index] = name, spec
            windows.add(_window_of(name, spec))
            layers.append(index)
        if len(windows) > 1:
            raise ValueError(f"layers with windows of {sorted(map(str, windows))} tokens share a block table")
        groups.append(Group(tuple(layers), int(group.kv_cache_spec.block_size), windows.pop()))
    return names, specs, groups


def _window_of(name: str, spec: Any) -> int | None:
    kind = type(spec).__name__
    if kind == "FullAttentionSpec" and not getattr(spec, "attention_chunk_size", None):
        if getattr(spec, "sliding_window", None):
            raise ValueError(
                f"{name} has a window and the engine keeps all its tokens: leave --disable-hybrid-kv-cache-manager out"
            )
        return None
    if kind == "SlidingWindowSpec" and not getattr(spec, "extra_retained_tokens", 0):
        return int(spec.sliding_window)
    what = {
        "MambaSpec": "keeps a state in place of keys and values",
        "MLAAttentionSpec": "keeps latent vectors, whose rotary part the engine orders otherwise than transformers",
    }
    raise ValueError(
        f"{name} {what.get(kind, 'is none')} ({kind}): karhunen serves layers of full and sliding attention in vLLM"
    )


def _check_layers(codec: Codec, specs: Mapping[int, Any], shard: HeadShard) -> None:
    shapes = {i: shape for i, shape in enumerate(codec.model.layers) if shape.kind in ("full", "sliding")}
    if shapes.keys() != specs.keys():
        raise ValueError(
            f"the codec has layers {_ranges(shapes)} with a cache, the engine has {_ranges(specs)}: it was made for "
            "another model"
        )
    for index, shape in shapes.items():
        spec = specs[index]
        window = int(spec.sliding_window) if type(spec).__name__ == "SlidingWindowSpec" else None
        mine = (shape.n_kv_heads // shard.count, shape.key_dim, shape.value_dim, shape.window_tokens)
        theirs = (spec.num_kv_heads, spec.head_size, spec.head_size_v, window)
        if mine != theirs or shape.note:
            raise ValueError(
                f"layer {index}: the codec has {_words(shape, shard.count)}, the engine {spec.num_kv_heads} KV heads "
                f"of {spec.head_size} and {spec.head_size_v}, window {window}: it was made for another model"
            )


def _words(shape: LayerShape, n_parts: int) -> str:
    sizes = f"{shape.n_kv_heads // n_parts} KV heads of {shape.key_dim} and {shape.value_dim}"
    return f"{sizes}, window {shape.window_tokens}{', ' + shape.note if shape.note else ''}"


def _quantized(spec: Any) -> bool:
    mode = getattr(spec, "kv_quant_mode", 0)
    return int(mode) != 0 or not spec.dtype.is_floating_point or spec.dtype.itemsize < 2


def _ranges(layers: Mapping[int, Any]) -> str:
    return f"{min(layers)} … {max(layers)} ({len(layers)})" if layers else "none"
