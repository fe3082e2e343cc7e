"""The serde `karhunen` of LMCache 0.5: chunks of its memory tier to pages, and back.

    memory tier [2, L, T, H·D] ──serialize──▶ page (self-describing) ──▶ disk, network
                               ◀─deserialize─

LMCache loads no serdes by itself, and builds its storage before it loads plug-ins: `register` must be called before
its server starts (`python -m karhunen.serving.lmcache` does both).
"""

import logging
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import get_registered_serde_types, register_serde_factory

from karhunen.codec import Codec
from karhunen.hf.checkpoint import checkpoint_fingerprint, checkpoint_folder
from karhunen.serving.chunks import ChunkCodec, page_of_buffer

NAME = "karhunen"
SETTINGS = ("codec", "model", "max_workers")

_LOG = logging.getLogger(__name__)


def register() -> None:
    """Make the serde known; a second call does nothing."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, make_serde)


def make_serde(settings: dict[str, Any]) -> Any:
    """From the `serde` of an L2 adapter: `codec` (a folder), `model` (a folder or a hub's id, whose weights are then
    part of a page's identity), `max_workers` (threads). ValueError for others, and for a codec that cannot serve."""
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        raise ValueError(f"unknown setting(s) {unknown} of the serde {NAME}; known: {list(SETTINGS)}")
    if not isinstance(settings.get("codec"), str):
        raise ValueError(f"the serde {NAME} needs `codec`, a folder as `karhunen calibrate` writes it")
    model = settings.get("model")
    weights = "" if model is None else checkpoint_fingerprint(checkpoint_folder(str(model)))
    chunks = ChunkCodec(Codec.from_pretrained(Path(settings["codec"]).expanduser()), weights)
    return AsyncSerdeProcessor(ToPages(chunks), FromPages(chunks), max_workers=int(settings.get("max_workers", 1)))


@final
class ToPages(Serializer):  # pyright: ignore[reportUntypedBaseClass]
    """Memory objects to pages."""

    def __init__(self, chunks: ChunkCodec) -> None:
        self.chunks = chunks

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """What the largest page of this layout takes, exactly. ValueError for a layout that is not the codec's."""
        try:
            shape, dtype = one_plane(layout_desc)
            return self.chunks.max_bytes(shape, dtype)
        except ValueError as error:  # LMCache says that a chunk was not stored, and not why
            _LOG.error("chunks are not stored: %s", error)
            raise

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Bytes written into `dst`; less than all of it where a chunk has fewer exact tokens than it may have."""
        page = self.chunks.encode(src.tensor, rank_of(key))
        data = torch.from_numpy(np.frombuffer(page, np.uint8).copy())
        dst.tensor.flatten().view(torch.uint8)[: len(page)].copy_(data)
        return len(page)


@final
class FromPages(Deserializer):  # pyright: ignore[reportUntypedBaseClass]
    """Pages to memory objects."""

    def __init__(self, chunks: ChunkCodec) -> None:
        self.chunks = chunks

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """ValueError, with the reason, for a page that is damaged, or another model's or codec's: LMCache then counts
        a load that failed, and the engine reads the tokens."""
        self.chunks.decode(page_of_buffer(src.tensor), dst.tensor, rank_of(key))


def rank_of(key: Any) -> int:
    """The tensor-parallel rank that LMCache packs into a key."""
    return (int(key.kv_rank) >> 16) & 0xFF


def one_plane(layout: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a layout of one tensor; ValueError for several."""
    if len(layout.shapes) != 1:
        raise ValueError(f"a chunk of {len(layout.shapes)} tensors {layout.shapes}; karhunen codes one")
    return tuple(int(n) for n in layout.shapes[0]), layout.dtypes[0]
