"""What pages of a codec are like, known before a token is coded: their layers, heads and parts, and their bytes.

bytes = header + per layer: entry, its exact tokens (4 bytes and two vectors each), planes, side tensors
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.codec import Codec, LayerCodec
from karhunen.device import HOST
from karhunen.pages.exact import most_exact
from karhunen.pages.frame import CODED, EXACT, HEADER, LENGTH, MAX_TOKENS, Entry
from karhunen.pages.sides import SideLayout
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.need import SLOTS, Slot
from karhunen.windows.refining import Refining

KeysValues = tuple[Float[Tensor, "h t d"], Float[Tensor, "h t e"]]


@final
@dataclass(frozen=True)
class PagePlan:
    """Pages of `codec` for vectors of `dtype`, of part i of n of the heads (`shard`)."""

    codec: Codec
    dtype: torch.dtype
    entropy: bool | None
    shard: tuple[int, int]

    def __post_init__(self) -> None:
        if isinstance(self.codec.window, Refining):
            raise ValueError(
                "a page holds tokens of one rate, and these have refinements; use RefinedPages, or a codec of one rate "
                "(karhunen:bits=2)"
            )
        if self.codec.window.drops:
            raise ValueError(
                f"{type(self.codec.window).__name__} drops tokens, and a page holds all of them; use a codec whose "
                "window drops nothing"
            )
        part, n_parts = self.shard
        if not 0 <= part < n_parts:
            raise ValueError(f"shard={self.shard} is not a part of a number of parts; use (0, 1) for all heads")
        for layer in self.layers if n_parts > 1 else ():
            self._check_shard(layer)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers of a page: those that keep keys and values of every token."""
        return tuple(i for i, shape in enumerate(self.codec.model.layers) if shape.kind == "full")

    @cached_property
    def granule_tokens(self) -> int:
        """A page has a multiple of this many tokens, and begins at one."""
        return math.lcm(1, *(layer.granule_tokens for layer in self.codec.layers.values()))

    @cached_property
    def layouts(self) -> dict[tuple[int, Slot], SideLayout]:
        """Of each coded side."""
        shapes = self.codec.model.layers
        return {
            (i, slot): SideLayout.of(layer.side(slot), shapes[i].key_dim if slot == "key" else shapes[i].value_dim)
            for i, layer in sorted(self.codec.layers.items())
            for slot in SLOTS
        }

    @property
    def is_fixed(self) -> bool:
        """Whether `page_bytes` is what every page takes, not a bound: no tokens kept by a rule, no entropy coding."""
        return not any(layer.exceptions or self.shrinks(layer) for layer in self.codec.layers.values())

    def page_bytes(self, n_tokens: int, first_token: int = 0) -> int:
        """The most bytes of a page of `n_tokens` from `first_token` on; with `is_fixed`, its bytes."""
        self.check_length(n_tokens)
        n_sink = self._n_sink(first_token, n_tokens)
        total = HEADER.size
        for layer in self.layers:
            shape, codec = self.codec.model.layers[layer], self.codec.layers.get(layer)
            heads = self.heads(shape)
            entry, vector = self.entry(layer, 0), len(heads) * (shape.key_dim + shape.value_dim) * self.dtype.itemsize
            total += entry.table_bytes
            if codec is None:
                total += n_tokens * vector
                continue
            rule = 0 if codec.exceptions is None else most_exact(n_tokens)
            total += min(n_tokens, n_sink + rule) * (LENGTH.size + vector)
            for slot in SLOTS:
                layout = self.layouts[layer, slot]
                total += sum(
                    layout.plane_bytes(part, n_tokens) + layout.side_bytes(part, n_tokens)
                    for part in self.parts(layout)
                )
        return total

    def entry(self, layer: int, n_exact: int) -> Entry:
        """The entry of a layer, its lengths zero."""
        shape, codec = self.codec.model.layers[layer], self.codec.layers.get(layer)
        heads = self.heads(shape)
        if codec is None:
            lengths = [(0,) * len(heads)] * 2
        else:
            lengths = [(0,) * len(self.parts(self.layouts[layer, slot])) for slot in SLOTS]
        kind = EXACT if codec is None else CODED
        return Entry(layer, kind, heads.start, len(heads), shape.n_kv_heads, n_exact, lengths[0], lengths[1])

    def heads(self, shape: LayerShape) -> range:
        """Of a layer, those that this shard holds."""
        part, n_parts = self.shard
        n = shape.n_kv_heads // n_parts
        return range(part * n, (part + 1) * n)

    def parts(self, layout: SideLayout) -> range:
        """Of a side, those that this shard holds."""
        part, n_parts = self.shard
        n = len(layout.parts) // n_parts
        return range(part * n, (part + 1) * n)

    def shrinks(self, codec: LayerCodec) -> bool:
        """Whether codes are deflated where that makes them smaller."""
        return codec.is_paged if self.entropy is None else self.entropy

    def checked(
        self, layers: Mapping[int, KeysValues], positions: Int[Tensor, " t"], page_tokens: int
    ) -> tuple[int, int]:
        """(tokens, first position) of what is to be encoded; ValueError if it makes no pages."""
        self.check_length(page_tokens)
        n_tokens = len(positions)
        first = int(positions[0]) if n_tokens else 0
        if not layers or n_tokens == 0 or n_tokens % page_tokens or first < 0 or first % self.granule_tokens:
            raise ValueError(
                f"{n_tokens} tokens of {len(layers)} layers from position {first} on make no pages of {page_tokens}; "
                f"give whole pages that begin at a multiple of {self.granule_tokens}"
            )
        if not bool((positions.cpu() == torch.arange(first, first + n_tokens, device=HOST)).all()):
            raise ValueError("a page's positions rise by one from token to token; these do not")
        for layer, pair in layers.items():
            if layer not in self.layers:
                raise ValueError(f"layer {layer} has no place in a page; this model's pages hold {list(self.layers)}")
            shape = self.codec.model.layers[layer]
            for slot, x, dim in zip(SLOTS, pair, (shape.key_dim, shape.value_dim), strict=True):
                want = (len(self.heads(shape)), n_tokens, dim)
                if tuple(x.shape) != want or x.dtype != self.dtype:
                    raise ValueError(
                        f"{slot}s of layer {layer} are {x.dtype} {tuple(x.shape)}; this page wants {self.dtype} {want}"
                    )
        return n_tokens, first

    def check_entry(self, entry: Entry, n_tokens: int) -> None:
        """ValueError unless a page's layer is laid out as this plan has it."""
        if entry.layer not in self.layers:
            raise ValueError(f"a page with layer {entry.layer}; pages of this model hold {list(self.layers)}")
        want = self.entry(entry.layer, entry.n_exact)
        heads, wanted = (range(e.first_head, e.first_head + e.n_heads) for e in (entry, want))
        if heads != wanted or entry.all_heads != want.all_heads:
            raise ValueError(
                f"a page with heads {list(heads)} of {entry.all_heads} in layer {entry.layer}, not {list(wanted)} of "
                f"{want.all_heads}; cut or join it"
            )
        if (entry.kind, len(entry.key), len(entry.value)) != (want.kind, len(want.key), len(want.value)):
            raise ValueError(f"a page whose layer {entry.layer} is laid out otherwise; make it again")
        if entry.kind == EXACT:
            shape = self.codec.model.layers[entry.layer]
            for lengths, dim in ((entry.key, shape.key_dim), (entry.value, shape.value_dim)):
                if any(length != n_tokens * dim * self.dtype.itemsize for length in lengths) or entry.n_exact:
                    raise ValueError(f"a page whose layer {entry.layer} has not the bytes of its tokens; make it again")

    def check_length(self, n_tokens: int) -> None:
        """ValueError unless `n_tokens` make a page."""
        if not 0 < n_tokens <= MAX_TOKENS or n_tokens % self.granule_tokens:
            raise ValueError(
                f"a page of {n_tokens} tokens; pages of this codec have a multiple of {self.granule_tokens}, at most "
                f"{MAX_TOKENS}"
            )

    def _n_sink(self, first_token: int, n_tokens: int) -> int:
        return min(max(0, self.codec.window.sink_tokens - first_token), n_tokens)

    def _check_shard(self, layer: int) -> None:
        shape, n_parts = self.codec.model.layers[layer], self.shard[1]
        joined = [s for s in SLOTS if layer in self.codec.layers and len(self.layouts[layer, s].parts) == 1]
        if shape.n_kv_heads % n_parts or joined:
            why = f"its {joined[0]}s are coded over all heads at once" if joined else f"it has {shape.n_kv_heads} heads"
            raise ValueError(f"layer {layer} cannot be cut into {n_parts} parts: {why}")
