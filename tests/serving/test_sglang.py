"""The SGLang backend against a stand-in of the abstract class and of the host pool, as 0.5.23 has them. Not SGLang."""

import sys
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.serving.stand_in import FULL, codec_of
from torch import Tensor

from karhunen.hf import checkpoint

PAGE, LAYERS, N_PAGES = 32, 2, 4
HEADS, SIZE = FULL.n_kv_heads, FULL.key_dim


class HiCacheStorage(ABC):
    """What of the class is called here: the abstract methods, and the registration."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        for i, key in enumerate(keys):
            if not self.exists(key):
                return i
        return len(keys)


class Pool:
    """A host pool of eight pages, in one of two orders."""

    def __init__(self, layout: str, heads: int = HEADS, layers: int = LAYERS) -> None:
        self.layout, self.page_size, self.layer_num, self.head_num, self.head_dim = layout, PAGE, layers, heads, SIZE
        self.dtype = torch.float32
        rows = (layers, 8 * PAGE) if layout == "layer_first" else (8 * PAGE, layers)
        self.kv_buffer = torch.zeros(2, *rows, heads, SIZE)

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + PAGE]
        return self.kv_buffer[:, index : index + PAGE]

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        self.get_data_page(index).copy_(data_page.reshape(self.get_data_page(index).shape))


@pytest.fixture
def backend_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].HiCacheStorage = HiCacheStorage  # type: ignore[attr-defined]
    return import_module("karhunen.serving.sglang.backend").KarhunenStorage


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    """Settings that name a codec and a model's files."""
    codec_of(*[FULL] * LAYERS).save_pretrained(tmp_path / "codec")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return {"codec": str(tmp_path / "codec"), "store": str(tmp_path / "store"), "interface_v1": 1}


def config(made: dict[str, Any], **changes: Any) -> Any:
    own = {
        "tp_rank": 0, "tp_size": 1, "pp_size": 1, "attn_cp_size": 1, "is_mla_model": False,
        "model_name": str(Path(made["codec"]).parent / "model"),
        "extra_config": {"backend_name": "karhunen", "module_path": "m", "class_name": "c", **made},
    }  # fmt: skip
    return SimpleNamespace(**{**own, **changes})


def filled(pool: Pool) -> Pool:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(0)))
    return pool


NAMES = [f"{i:064x}" for i in range(N_PAGES)]


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("before", [None, [], ["x", "y"]], ids=["no prefix told", "at the start", "after two pages"])
def test_pages_leave_the_host_pool_and_come_back(
    backend_class: Any, made: dict[str, Any], layout: str, before: list[str] | None
) -> None:
    storage, pool = backend_class(config(made), {}), filled(Pool(layout))
    storage.register_mem_pool_host(pool)
    given, slots = pool.kv_buffer.clone(), torch.arange(N_PAGES * PAGE) + 2 * PAGE
    told = SimpleNamespace(prefix_keys=before)
    assert storage.batch_exists(NAMES) == 0
    assert storage.batch_set_v1(NAMES, slots, told) == [True] * N_PAGES
    assert storage.batch_exists(NAMES) == N_PAGES
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1(NAMES, slots, told) == [True] * N_PAGES
    for i in range(N_PAGES):
        index = (i + 2) * PAGE
        got, exact = pool.get_data_page(index).clone(), pool.get_data_page(index)
        pool.kv_buffer, back = given, pool.kv_buffer
        exact = pool.get_data_page(index)
        assert float((got - exact).norm() / exact.norm()) < 0.02
        pool.kv_buffer = back
    assert not bool(pool.get_data_page(0).any()), "a page that nobody asked for was written"


def test_what_follows_a_page_that_is_gone_or_damaged_is_not_restored(backend_class: Any, made: dict[str, Any]) -> None:
    storage, pool = backend_class(config(made), {}), filled(Pool("layer_first"))
    storage.register_mem_pool_host(pool)
    slots = torch.arange(N_PAGES * PAGE)
    storage.batch_set_v1(NAMES, slots)
    name = storage._key(NAMES[1])
    storage.store.inner.put(name, storage.store.inner.get(name)[:-1] + b"?")
    assert storage.batch_get_v1(NAMES, slots) == [True, False, False, False]
    assert storage.store.counts.refusals == 1 and not storage.exists(NAMES[1])


def test_ranks_do_not_meet(backend_class: Any, made: dict[str, Any]) -> None:
    for rank in (0, 1):
        storage = backend_class(config(made, tp_rank=rank, tp_size=2), {})
        storage.register_mem_pool_host(filled(Pool("layer_first", heads=HEADS // 2)))
        assert not storage.exists(NAMES[0])
        assert storage.batch_set_v1(NAMES[:1], torch.arange(PAGE)) == [True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"is_mla_model": True}, "not served"), ({"pp_size": 2}, "not served"), ({"extra_config": {}}, "interface_v1")],
    ids=["latent", "pipeline", "no interface"],
)
def test_what_pages_cannot_hold_is_refused(
    backend_class: Any, made: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        backend_class(config(made, **changes), {})


@pytest.mark.parametrize("pool", [Pool("page_head"), Pool("layer_first", layers=3)], ids=["order", "layers"])
def test_another_host_pool_is_refused(backend_class: Any, made: dict[str, Any], pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"host pages in order|a chunk of"):
        backend_class(config(made), {}).register_mem_pool_host(pool)


def test_the_fingerprint_is_of_the_models_files(made: dict[str, Any]) -> None:
    assert len(checkpoint.checkpoint_fingerprint(Path(made["codec"]).parent / "model")) == 32
