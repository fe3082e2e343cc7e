"""The serde inside LMCache's own storage manager: chunks go out of memory to its disk tier as pages, and come back."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from tests.serving.engine.models import calibrated, save

from karhunen.codec import Codec
from karhunen.serving.chunks import ChunkCodec
from karhunen.serving.lmcache.serde import make_serde, register

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # LMCache's own are many
SHAPE = torch.Size((2, 3, 256, 128))  # the small llama: 3 layers, 2 heads of 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(codec, model)."""
    root = tmp_path_factory.mktemp("lmcache")
    model = save("llama", root / "model")
    return calibrated(model, root / "codec", "int4"), model


@pytest.fixture
def manager(made: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    """As its server builds it from its command line."""
    from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
    from lmcache.v1.distributed.storage_manager import StorageManager

    register()
    register()
    codec, model = made
    serde = {"type": "karhunen", "codec": str(codec), "model": str(model)}
    adapter = {"type": "fs", "base_path": str(tmp_path / "l2"), "serde": serde}
    parser = argparse.ArgumentParser()
    add_storage_manager_args(parser)
    words = ["--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
    manager = StorageManager(parse_args_to_config(parser.parse_args(words)))
    yield manager
    manager.close()


def keys(n: int) -> list[ObjectKey]:
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [ObjectKey(chunk_hash=bytes([i]) * 16, model_name="m", kv_rank=rank) for i in range(n)]


def store(manager: Any, asked: list[ObjectKey], chunks: list[torch.Tensor]) -> None:
    objects = manager.reserve_write(asked, MemoryLayoutDesc([SHAPE], [torch.bfloat16]))
    assert list(objects) == asked
    for key, chunk in zip(asked, chunks, strict=True):
        objects[key].tensor.copy_(chunk)
    manager.finish_write(asked)


def fetch(manager: Any, asked: list[ObjectKey]) -> list[torch.Tensor]:
    """What the storage manager gets back, as far as it gets."""
    from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

    row = GroupedObjectKeys(keys=asked, object_group_id=0, layout_desc=MemoryLayoutDesc([SHAPE], [torch.bfloat16]))
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([row]))
    assert manager.wait_prefetch_status(handle, 60)
    n = manager.query_prefetch_status(handle).hit_cells[0].popcount()
    with manager.read_prefetched_results(asked[:n]) as objects:
        found = [item.tensor.clone() for item in objects]
    manager.finish_read_prefetched(asked[:n])
    return found


def files(tmp_path: Path, n: int) -> list[Path]:
    for _ in range(300):
        found = [path for path in (tmp_path / "l2").rglob("*") if path.is_file() and path.stat().st_size]
        if len(found) >= n:
            return sorted(found)
        time.sleep(0.1)
    raise AssertionError(f"{n} chunks were not stored in 30 seconds")


def test_chunks_leave_memory_as_pages_and_come_back(manager: Any, made: tuple[Path, Path], tmp_path: Path) -> None:
    asked, given = keys(3), [torch.randn(SHAPE).bfloat16() for _ in range(3)]
    store(manager, asked, given)
    found = files(tmp_path, 3)
    time.sleep(0.5)
    bound = ChunkCodec(Codec.from_pretrained(made[0]), "0" * 32).max_bytes(SHAPE, torch.bfloat16)
    dense = given[0].nbytes
    assert all(path.stat().st_size <= bound < dense / 3 for path in found)
    assert all(path.read_bytes().startswith(b"KARHPAGE") for path in found)
    manager.delete_l1_keys(asked, force=True)
    got = fetch(manager, asked)
    assert len(got) == 3
    for mine, theirs in zip(got, given, strict=True):
        assert float((mine - theirs).float().norm() / theirs.float().norm()) < 0.2


def test_a_damaged_page_is_a_miss(manager: Any, tmp_path: Path) -> None:
    asked = keys(1)
    store(manager, asked, [torch.randn(SHAPE).bfloat16()])
    (path,) = files(tmp_path, 1)
    time.sleep(0.5)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    manager.delete_l1_keys(asked, force=True)
    assert fetch(manager, asked) == []


def test_settings_are_strict(made: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="unknown setting"):
        make_serde({"codec": str(made[0]), "codecs": 1})
    with pytest.raises(ValueError, match="needs `codec`"):
        make_serde({})


def test_the_launcher_knows_the_serde(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Its own server, with our arguments: it builds its storage, which LMCache's launcher refuses to."""
    adapter = {"type": "fs", "base_path": str(tmp_path), "serde": {"type": "karhunen", "codec": str(tmp_path / "none")}}
    words = ["--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
    said = {}
    for module in ("karhunen.serving.lmcache", "lmcache.v1.multiprocess.http_server"):
        done = subprocess.run(
            [sys.executable, "-m", module, *words], capture_output=True, text=True, timeout=300, check=False,
            cwd=tmp_path,
        )  # fmt: skip
        said[module] = done.stdout + done.stderr
    assert "Unknown serde type 'karhunen'" in said["lmcache.v1.multiprocess.http_server"]
    assert "Unknown serde type" not in said["karhunen.serving.lmcache"]
    assert "config.json" in said["karhunen.serving.lmcache"], "it would have asked for the codec that is not there"
