"""A dynamic storage backend for SGLang's HiCache, written against the interface of 0.5.23 and not run in SGLang.

    host pool (a page of all layers) ──▶ page ──▶ store of karhunen ──▶ page ──▶ host pool

SGLang names a page by the hash of all tokens up to its end and hands over the names before it, so a page's start is
known where these are passed, and read from its keys where not.
"""

import logging
from typing import Any, final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from karhunen.hf.checkpoint import checkpoint_fingerprint, checkpoint_folder
from karhunen.serving.chunks import ChunkCodec
from karhunen.serving.page_names import HeadShard, PageNames
from karhunen.serving.settings import ServingSettings

_LOG = logging.getLogger(__name__)

OWN = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys"})
"""Settings of SGLang's that stand beside ours."""

TO_CHUNK = {
    "layer_first": (0, 1, 2, 3, 4),  # [2, layer, token, head, size]
    "page_first": (0, 2, 1, 3, 4),  # [2, token, layer, head, size]
}


@final
class KarhunenStorage(HiCacheStorage):  # pyright: ignore[reportUntypedBaseClass]
    """`--hicache-storage-backend dynamic`; the extra configuration holds `ServingSettings` beside SGLang's own fields.

    ValueError at start, with the reason, for a model or a layout that pages cannot hold.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ValueError('karhunen needs "interface_v1": 1 beside its settings, the interface by host indices')
        if storage_config.is_mla_model or storage_config.pp_size > 1 or storage_config.attn_cp_size > 1:
            raise ValueError("latent attention, pipeline parallel and context parallel are not served in SGLang")
        self.settings = ServingSettings.from_dict({k: v for k, v in extra.items() if k not in OWN})
        codec = self.settings.load_codec()
        weights = checkpoint_fingerprint(checkpoint_folder(storage_config.model_name))
        self.chunks = ChunkCodec(codec, weights)
        self.store = self.settings.open_store()
        heads = {layer.n_kv_heads for layer in codec.model.layers if layer.kind == "full"}
        self.shard = HeadShard.of_rank(storage_config.tp_rank, storage_config.tp_size, max(heads))
        self._names: PageNames | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool; ValueError for an order of its pages that is not read here."""
        super().register_mem_pool_host(mem_pool_host)
        if mem_pool_host.layout not in TO_CHUNK:
            raise ValueError(f"host pages in order {mem_pool_host.layout!r}; use --hicache-mem-layout {list(TO_CHUNK)}")
        heads = next(layer.n_kv_heads for layer in self.chunks.codec.model.layers if layer.kind == "full")
        width = heads // self.shard.count * mem_pool_host.head_dim
        shape = (2, mem_pool_host.layer_num, mem_pool_host.page_size, width)
        pages = self.chunks.pages_of(shape, mem_pool_host.dtype, self.shard.index)
        pages.page_bytes(mem_pool_host.page_size)  # refuses a length that is no page
        self._names = PageNames.of(pages, mem_pool_host.page_size)

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Which pages were stored, or are there already."""
        if not self.shard.writes:
            return [True] * len(keys)
        return [
            self.store.has(self._key(key)) or self._stored(key, index, start)
            for key, index, start in self._each(keys, host_indices, extra_info)
        ]

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Which pages are in the host pool now; none behind the first that is not."""
        found: list[bool] = []
        for key, index, _ in self._each(keys, host_indices, extra_info):
            found.append(all(found) and self._restored(key, index))
        return found

    def exists(self, key: str) -> bool:
        """Whether the page is in the store."""
        return self.store.has(self._key(key))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Not of the interface that is served (`interface_v1`)."""
        raise NotImplementedError("karhunen serves batch_get_v1")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """As `get`."""
        raise NotImplementedError("karhunen serves batch_get_v1")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """As `get`."""
        raise NotImplementedError("karhunen serves batch_set_v1")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """As `get`."""
        raise NotImplementedError("karhunen serves batch_set_v1")

    def get_stats(self) -> Any:
        """None: SGLang knows no series of ours; `store.counts` has them."""
        return None

    def _each(self, keys: list[str], host_indices: Tensor, extra_info: Any) -> list[tuple[str, int, int | None]]:
        """(key, first slot in the host pool, first token if it is known) of each page."""
        size = self.mem_pool_host.page_size
        before = getattr(extra_info, "prefix_keys", None)
        return [
            (key, int(host_indices[i * size]), None if before is None else (len(before) + i) * size)
            for i, key in enumerate(keys)
        ]

    def _stored(self, key: str, index: int, start: int | None) -> bool:
        try:
            page = self.chunks.encode(self._chunk(index), self.shard.index, start)
        except ValueError as error:
            self.store.failed(str(error))
            _LOG.warning("a page was not stored: %s", error)
            return False
        return self.store.kept(self._key(key), page)

    def _restored(self, key: str, index: int) -> bool:
        name = self._key(key)
        page = self.store.get(name)
        if page is None:
            return False
        pool, chunk = self.mem_pool_host, self._chunk(index)
        try:
            self.chunks.decode(page, chunk, self.shard.index)
        except ValueError as error:
            self.store.refuse(name, str(error))
            _LOG.warning("page %s was refused: %s", name, error)
            return False
        back = chunk.unflatten(-1, (-1, pool.head_dim)).permute(TO_CHUNK[pool.layout])
        pool.set_from_flat_data_page(index, back.flatten())
        return True

    def _chunk(self, index: int) -> Tensor:
        """A page of the host pool as `[2, layer, token, heads · size]`, a copy."""
        pool = self.mem_pool_host
        page: Tensor = pool.get_data_page(index, flat=False)
        return page.permute(TO_CHUNK[pool.layout]).flatten(-2).clone(memory_format=torch.contiguous_format)

    def _key(self, key: str) -> str:
        assert self._names is not None, "SGLang registers its host pool before it asks for pages"
        return self._names.named(key) + self.shard.suffix
