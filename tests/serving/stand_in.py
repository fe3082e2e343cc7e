"""Stand-ins for what an engine hands over: attention layers whose cache has a known order, requests, settings."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tests.synthetic import cached, quick, statistics
from torch import Tensor

from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.recipes import make
from karhunen.serving.settings import ServingSettings
from karhunen.serving.vllm.startup import Plan, plan
from karhunen.serving.vllm.worker import WorkerHalf
from karhunen.statistics.identity import LayerShape
from karhunen.stores import Counted, MemoryStore

BLOCK, WINDOW = 16, 20
FULL = LayerShape("full", 2, 4, 32, 32)
SLIDING = LayerShape("sliding", 2, 4, 32, 32, WINDOW)


class SideBySide:
    """Keys, then values, token by token, as GPU backends keep them."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        n = cache.shape[2]
        cache[slots // n, :, slots % n] = torch.cat([key, value], -1).to(cache.dtype)


class Transposed:
    """All keys of a block, coordinate by coordinate, then all its values, as a CPU backend keeps them."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        n, d, e = cache.shape[2], key.shape[2], value.shape[2]
        flat = cache.flatten(2)
        for k, v, slot in zip(key, value, slots.tolist(), strict=True):
            block, token = divmod(slot, n)
            flat[block, :, torch.arange(d) * n + token] = k.to(cache.dtype)
            flat[block, :, n * d + token * e : n * d + (token + 1) * e] = v.to(cache.dtype)
        cache.copy_(flat.view_as(cache))


class Rounding(SideBySide):
    """A cache that does not keep what it is given."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        super().do_kv_cache_update(layer, key / 2, value / 2, cache, slots)


@dataclass
class Request:
    """As the engine's scheduler has it."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    prompt_token_ids: list[int] = field(default_factory=list)
    pooling_params: Any = None


class FullAttentionSpec(SimpleNamespace):
    """Named as the engine's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as the engine's."""


class MambaSpec(SimpleNamespace):
    """Named as the engine's."""


class MLAAttentionSpec(SimpleNamespace):
    """Named as the engine's."""


def spec(shape: LayerShape, parts: int = 1, **changes: Any) -> Any:
    """Of a layer, of one of `parts` ranks."""
    kind = FullAttentionSpec if shape.kind == "full" else SlidingWindowSpec
    sizes = {
        "block_size": BLOCK, "num_kv_heads": max(1, shape.n_kv_heads // parts), "head_size": shape.key_dim,
        "head_size_v": shape.value_dim, "dtype": torch.float32, "sliding_window": shape.window_tokens,
    }  # fmt: skip
    return kind(**{**sizes, **changes})


def cache_config(*groups: tuple[Any, list[int]]) -> Any:
    """Of groups (spec, layers)."""
    made = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"model.layers.{i}.self_attn.attn" for i in layers])
        for spec, layers in groups
    ]
    return SimpleNamespace(kv_cache_groups=made)


def engine_config(rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    """The engine's, as karhunen serves it; `changes` by dotted name with `__` for the dot."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(
            rank=rank, tensor_parallel_size=ranks, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(hf_overrides={}),
        load_config=SimpleNamespace(load_format="auto"),
    )  # fmt: skip
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        setattr(getattr(config, part), attribute, value)
    return config


def codec_of(*shapes: LayerShape, recipe: str = "int8") -> Codec:
    """Of a model with these layers; layers with a window are not coded."""
    made = quick(make(recipe))
    return fit(made, statistics(made, *shapes))


def plan_of(*shapes: LayerShape, recipe: str = "int8", rank: int = 0, ranks: int = 1, **settings: Any) -> Plan:
    """Full layers in the first group, sliding ones in the second."""
    groups: list[tuple[Any, list[int]]] = []
    for kind in ("full", "sliding"):
        layers = [i for i, shape in enumerate(shapes) if shape.kind == kind]
        if layers:
            groups.append((spec(shapes[layers[0]], ranks), layers))
    asked = ServingSettings("codec", "store", **settings)
    return plan(engine_config(rank, ranks), cache_config(*groups), asked, codec_of(*shapes, recipe=recipe))


class Cache:
    """An engine's cache of 64 blocks a layer, filled through the backend, and a worker's half on it."""

    def __init__(self, made: Plan, store: MemoryStore | None = None, impl: Any = None, n_blocks: int = 64) -> None:
        self.plan = made
        self.store = Counted(MemoryStore() if store is None else store)
        self.layers: dict[str, Any] = {}
        self.views: dict[str, Tensor] = {}
        for index, name in made.names_of_layers.items():
            shape = made.codec.model.layers[index]
            heads = shape.n_kv_heads // made.shard.count
            self.layers[name] = SimpleNamespace(impl=impl or SideBySide())
            self.views[name] = torch.zeros(n_blocks, heads, BLOCK, shape.key_dim + shape.value_dim)
        self.worker = WorkerHalf(made, self.store, self.layers, self.views)

    def fill(self, n_tokens: int, blocks: list[int], seed: int = 0) -> None:
        """Write a text's vectors into blocks of every layer, this rank's heads of them."""
        for index in self.plan.names_of_layers:
            key, value = self.vectors(index, n_tokens, seed)
            self.worker.layers[index].write(key, value, 0, blocks)

    def vectors(self, index: int, n_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Of a text, in one layer."""
        shape, shard = self.plan.codec.model.layers[index], self.plan.shard
        n = shape.n_kv_heads // shard.count
        own = slice(shard.index * n, (shard.index + 1) * n)
        key, value = cached(shape, 1, n_tokens, seed + index)
        return key[0, own], value[0, own]

    def read(self, index: int, blocks: list[int]) -> tuple[Tensor, Tensor]:
        """What blocks of a layer hold."""
        layer = self.worker.layers[index]
        return layer.read(layer.snapshot(torch.tensor(blocks)))
