"""Chunks of a cache server as pages: one tensor of all layers to self-describing bytes of a known bound, and back.

    split  [2, L, T, H·D]        keys, then values
    fused  [1, L, T, H·2D]       a head's key and value side by side
    latent [1, L, T, C + R]      latent attention: the compressed vector, then the rotary part

L counts the layers that keep all tokens, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.pages import PageCodec
from karhunen.pages.frame import read
from karhunen.serving.chunk_start import can_find_start, chunk_start, needs_start
from karhunen.serving.own_exact import own_exact

MAX_TOKENS = 1 << 17  # starts of chunks are looked for below this


@final
@dataclass(frozen=True)
class ChunkLayout:
    """Of one shape: how many tokens, of which heads, and how they are laid out."""

    shape: tuple[int, ...]
    kind: str
    n_tokens: int
    n_heads: int

    @classmethod
    def of(cls, codec: Codec, shape: Sequence[int]) -> "ChunkLayout":
        """ValueError, with what was wanted, for a shape that the codec's model does not have."""
        layers = [layer for layer in codec.model.layers if layer.kind == "full"]
        if len(shape) == 3:
            raise ValueError(
                f"a chunk of {list(shape)} is of LMCache's engine-driven transfer, as from vLLM on a CPU: blocks come "
                "as the attention backend keeps them, on a CPU with keys transposed; use karhunen's own connector there"
            )
        sizes = {(layer.n_kv_heads, layer.key_dim, layer.value_dim) for layer in layers}
        if len(sizes) != 1 or len(shape) != 4:
            raise ValueError(f"a chunk of {list(shape)}: this model's layers are {sorted(sizes)}; one size is served")
        heads, key_dim, value_dim = sizes.pop()
        planes, n_layers, n_tokens, width = shape
        each = key_dim if planes == 2 and key_dim == value_dim else key_dim + value_dim
        n_heads = width // each
        if planes not in (1, 2) or n_layers != len(layers) or width % each or not n_heads or heads % n_heads:
            raise ValueError(
                f"a chunk of {list(shape)}: this codec's model has {len(layers)} layers that keep all tokens, with "
                f"{heads} heads of {key_dim} and {value_dim}; given are other layers or heads"
            )
        kind = "split" if planes == 2 else "latent" if key_dim != value_dim else "fused"
        if planes == 2 and key_dim != value_dim:
            raise ValueError(f"a chunk of {list(shape)}: keys of {key_dim} and values of {value_dim} lie in one plane")
        return cls(tuple(shape), kind, n_tokens, n_heads)

    def vectors(self, chunk: Tensor, index: int, key_dim: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values `[h t d]` of the layer at `index`; what is written to them is in the chunk."""
        if self.kind == "split":
            key, value = (chunk[i, index].unflatten(-1, (self.n_heads, -1)).transpose(0, 1) for i in (0, 1))
            return key, value
        both = chunk[0, index].unflatten(-1, (self.n_heads, -1)).transpose(0, 1)
        return both[..., :key_dim], both[..., key_dim:]


@final
@dataclass(frozen=True)
class ChunkCodec:
    """Chunks of one model; `weights` is its fingerprint, empty where it is not known.

    ValueError if the codec's codes depend on positions that no chunk tells and no mean of the keys betrays.
    """

    codec: Codec
    weights: str = ""
    knows_starts: bool = False

    def __post_init__(self) -> None:
        if needs_start(self.codec) and not self.knows_starts and not can_find_start(self.codec):
            raise ValueError(
                "this codec turns keys back by their positions, and chunks are handed over without them; use one that "
                "does not (int4, nova_kv) or whose keys are centered (karhunen)"
            )

    @cached_property
    def _made(self) -> dict[Any, PageCodec]:
        return {}

    def pages(self, layout: ChunkLayout, dtype: torch.dtype, part: int) -> PageCodec:
        """For part `part` of the heads."""
        heads = next(layer.n_kv_heads for layer in self.codec.model.layers if layer.kind == "full")
        shard = (part % (heads // layout.n_heads), heads // layout.n_heads)
        if (dtype, shard) not in self._made:
            self._made[dtype, shard] = PageCodec(self.codec, dtype, self.weights, shard=shard)
        return self._made[dtype, shard]

    def pages_of(self, shape: Sequence[int], dtype: torch.dtype, part: int = 0) -> PageCodec:
        """As `pages`, by a chunk's shape; ValueError for one that the codec's model does not have."""
        return self.pages(ChunkLayout.of(self.codec, shape), dtype, part)

    def max_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """No chunk of this shape takes more; one at the start of a text may take exactly this much."""
        layout = ChunkLayout.of(self.codec, shape)
        return self.pages(layout, dtype, 0).page_bytes(layout.n_tokens)

    def encode(self, chunk: Tensor, part: int = 0, start: int | None = None) -> bytes:
        """A chunk as a page; `start` is found where it is not known."""
        layout = ChunkLayout.of(self.codec, chunk.shape)
        pages = self.pages(layout, chunk.dtype, part)
        shapes = self.codec.model.layers
        layers = {layer: layout.vectors(chunk, i, shapes[layer].key_dim) for i, layer in enumerate(pages.layers)}
        if start is None:
            start = self._start(layers, pages.shard[0] * layout.n_heads)
        positions = torch.arange(start, start + layout.n_tokens, device=HOST)
        return pages.encode(layers, positions, own_exact(pages, layers, layout.n_tokens))

    def decode(self, page: bytes, chunk: Tensor, part: int = 0) -> None:
        """The mirror of `encode`, into a chunk; ValueError, with the reason, if the page is refused."""
        layout = ChunkLayout.of(self.codec, chunk.shape)
        pages = self.pages(layout, chunk.dtype, part)
        frame = pages.open(page)
        if frame.n_tokens != layout.n_tokens:
            raise ValueError(f"a page of {frame.n_tokens} tokens for a chunk of {layout.n_tokens}")
        shapes = self.codec.model.layers
        where = {layer: i for i, layer in enumerate(pages.layers)}
        for layer, given in pages.decode_layers([page]):
            for mine, theirs in zip(layout.vectors(chunk, where[layer], shapes[layer].key_dim), given, strict=True):
                mine.copy_(theirs)

    def _start(self, layers: dict[int, tuple[Tensor, Tensor]], first_head: int) -> int:
        if not can_find_start(self.codec):
            return 0
        return chunk_start(self.codec, layers, first_head, MAX_TOKENS)


def page_of_buffer(buffer: Tensor) -> bytes:
    """The page that a buffer of bytes begins with; what follows it belongs to nobody. ValueError if there is none."""
    data = buffer.flatten().view(torch.uint8)
    head = bytes(data[:40].tolist())
    n_bytes = int.from_bytes(head[16:24], "little")
    if not head.startswith(b"KARHPAGE") or n_bytes > data.numel():
        read(head)  # says what is wrong
    return data[:n_bytes].numpy().tobytes()
