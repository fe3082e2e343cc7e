"""Pages of progressive tokens: the base first, then a page for each refinement, of which any first few can be read.

    [ base: a page like any, of one size ][ refinement 1 ][ refinement 2 ] …

The base is a page of `base_codec`, which needs nothing else. A refinement says of each layer of the model which tokens
of the page have it, and holds their planes. Dropping one is removing its string from a store; nothing is read for it,
and those after it are then left out. So a prefix can be used as soon as its bases are there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from karhunen.codec import Codec, LayerCodec, Packed, SideCodec
from karhunen.packing.bit_fields import BitFields
from karhunen.pages.frame import CODED, LENGTH, REFINEMENT, Entry, Frame, Section, read
from karhunen.pages.layer_pages import Refine
from karhunen.pages.page_codec import PageCodec, digest
from karhunen.pages.plan import KeysValues
from karhunen.quantizers.embedded import EmbeddedQuantizer
from karhunen.statistics.need import SLOTS, Slot
from karhunen.windows.refining import Refining


def base_codec(codec: Codec) -> Codec:
    """The codec of the bytes that every token has; ValueError where tokens have nothing besides."""
    if not isinstance(codec.window, Refining):
        raise ValueError("tokens of this codec have one rate and no refinements; use PageCodec, or a progressive codec")
    layers = {i: replace(layer, key=_base(layer.key), value=_base(layer.value)) for i, layer in codec.layers.items()}
    return replace(codec, window=codec.window.window, layers=layers)


def refinement_key(key: str, number: int) -> str:
    """Where a store keeps refinement `number` (1, 2, …) of the page under `key`."""
    return f"{key}-refinement{number}"


@final
@dataclass(frozen=True)
class RefinedPages:
    """Pages of a progressive `codec` for vectors of `dtype`; fingerprints as `PageCodec` has them."""

    codec: Codec
    dtype: torch.dtype = torch.bfloat16
    weights: str = ""
    tokenizer: str = ""

    @cached_property
    def base(self) -> PageCodec:
        """The pages that come first; their sizes are known and alike."""
        return PageCodec(base_codec(self.codec), self.dtype, self.weights, self.tokenizer)

    def encode_pages(
        self,
        layers: Mapping[int, KeysValues],
        positions: Int[Tensor, " t"],
        page_tokens: int,
        classes: Mapping[int, Int[Tensor, " t"]],
    ) -> list[list[bytes]]:
        """Of each page its base, then its refinements, as many as a token of it has; `classes` are refinements of each
        token, by layer. Tokens that stay exact get none. ValueError for classes that are none of the codec's."""
        bases = self.base.encode_pages(layers, positions, page_tokens)
        n_most = cast("Refining", self.codec.window).n_layers
        for layer in layers.keys() & self.codec.layers.keys():
            given = classes.get(layer)
            ends = (-1, -1) if given is None else (int(given.min()), int(given.max()))
            if given is None or given.shape != positions.shape or ends[0] < 0 or ends[1] > n_most:
                said = "none" if given is None else f"{len(given)} from {ends[0]} to {ends[1]}"
                raise ValueError(
                    f"classes of layer {layer} are {said}; {len(positions)} are wanted, from 0 to {n_most}"
                )
        made = [[base] for base in bases]
        frames = [read(base) for base in bases]
        for number in range(1, n_most + 1):
            for page, frame in enumerate(frames):
                run = slice(page * page_tokens, (page + 1) * page_tokens)
                sections = [
                    self._section(section, number, layers[section.entry.layer], positions, run, classes)
                    for section in frame.sections
                    if section.entry.kind == CODED
                ]
                if any(section.entry.n_exact for section in sections):
                    owner = replace(frame.owner, codec=digest(self.codec.fingerprint()))
                    more = replace(frame, kind=REFINEMENT, owner=owner, refinement=number, sections=tuple(sections))
                    made[page].append(more.write())
        return made

    def decode_pages(self, pages: Sequence[Sequence[bytes]]) -> dict[int, KeysValues]:
        """Of pages that follow each other, each a base and the first few of its refinements, or none."""
        if any(not page for page in pages):
            raise ValueError("a page without its base; a refinement alone decodes to nothing")
        frames = [
            [self._opened(more, base, number) for number, more in enumerate(others, start=1)]
            for base, others in ((self.base.open(page[0]), page[1:]) for page in pages)
        ]
        starts = [0]
        for page in pages:
            starts.append(starts[-1] + read(page[0]).n_tokens)

        def refine(layer: int) -> Refine:
            return _Refiner(self.codec.layers.get(layer), layer, starts, frames).put_over

        return dict(self.base.decode_layers([page[0] for page in pages], refine=refine))

    def _opened(self, page: bytes, base: Frame, number: int) -> Frame:
        """ValueError, with the reason, unless it is that refinement of the page whose base this is."""
        frame = read(page)
        if frame.kind != REFINEMENT or frame.refinement != number:
            what = f"refinement {frame.refinement}" if frame.kind == REFINEMENT else f"a page of kind {frame.kind}"
            raise ValueError(f"{what} where refinement {number} belongs; give the first few in order")
        owner = replace(self.base.owner, codec=digest(self.codec.fingerprint()))
        if reason := frame.owner.mismatch(owner):
            raise ValueError(f"a refinement that is not ours: {reason}")
        if (frame.first_token, frame.n_tokens) != (base.first_token, base.n_tokens):
            raise ValueError(
                f"a refinement of tokens {frame.first_token} to {frame.first_token + frame.n_tokens}, its base has "
                f"{base.first_token} to {base.first_token + base.n_tokens}"
            )
        held = [section.entry.layer for section in base.sections if section.entry.kind == CODED]
        if [section.entry.layer for section in frame.sections] != held:
            raise ValueError(f"a refinement of other layers than those of its base, {held}; make it again")
        for section in frame.sections:
            for slot, lengths in zip(SLOTS, (section.entry.key, section.entry.value), strict=True):
                want = _planes(self.codec.layers[section.entry.layer].side(slot), number) * section.entry.n_exact
                if lengths != (want,):
                    raise ValueError(
                        f"a refinement with {lengths} bytes of {slot}s in layer {section.entry.layer}, where {want} "
                        "belong; make it again"
                    )
        return frame

    def _section(
        self,
        base: Section,
        number: int,
        given: KeysValues,
        positions: Tensor,
        run: slice,
        classes: Mapping[int, Tensor],
    ) -> Section:
        entry, codec = base.entry, self.codec.layers[base.entry.layer]
        has = classes[entry.layer][run].cpu() >= number
        for (i,) in LENGTH.iter_unpack(base.exact):
            has[i] = False
        parts: list[bytes] = []
        for slot, x in zip(SLOTS, given, strict=True):
            side = codec.to(x.device).side(slot)
            edges = _edges(side)
            planes = side.encode(x[None, :, run], positions[None, run].to(x.device)).planes[0].cpu()
            parts.append(planes[edges[number - 1] : edges[number], has].contiguous().numpy().tobytes())
        index = b"".join(LENGTH.pack(i) for i in has.nonzero()[:, 0].tolist())
        made = Entry(
            entry.layer, CODED, entry.first_head, entry.n_heads, entry.all_heads, int(has.sum()),
            (len(parts[0]),), (len(parts[1]),),
        )  # fmt: skip
        return Section(made, index, (parts[0],), (parts[1],))


@final
@dataclass(frozen=True)
class _Refiner:
    """What refinements say of one layer: `frames` of each page, whose tokens begin at `starts`."""

    codec: LayerCodec | None
    layer: int
    starts: Sequence[int]
    frames: Sequence[Sequence[Frame]]

    def put_over(self, slot: Slot, packed: Packed, positions: Tensor, x: Tensor) -> None:
        """Tokens of each class are decoded from all planes that they have."""
        assert self.codec is not None, "only coded layers are refined"
        side = self.codec.side(slot)
        for start, frames in zip(self.starts, self.frames, strict=False):
            index: list[Tensor] = []
            planes: list[Tensor] = []
            for number, frame in enumerate(frames, start=1):
                section = next(s for s in frame.sections if s.entry.layer == self.layer)
                part = section.key[0] if slot == "key" else section.value[0]
                there = np.frombuffer(section.exact, "<u4").astype(np.int64)
                index.append(torch.from_numpy(there))
                held = np.frombuffer(part, np.uint8).reshape(_planes(side, number), len(there))
                planes.append(torch.from_numpy(held.copy()))
            for number in range(1, len(frames) + 1):
                last = index[number - 1]
                if number > 1 and not bool(torch.isin(last, index[number - 2]).all()):
                    raise ValueError(f"refinement {number} has tokens in layer {self.layer} that have none before it")
                mine = last if number == len(frames) else last[~torch.isin(last, index[number])]
                if not len(mine):
                    continue
                columns = [p[:, torch.isin(i, mine)] for p, i in zip(planes[:number], index, strict=False)]
                whole = torch.cat([packed.planes[0][:, start + mine], *columns])[None]
                x[0][:, start + mine] = side.decode(Packed(whole, {}), positions[:, start + mine])[0]


def _base(side: SideCodec) -> SideCodec:
    quantizer = cast("EmbeddedQuantizer", side.quantizer).base
    return replace(side, quantizer=quantizer, layout=BitFields(quantizer.widths))


def _edges(side: SideCodec) -> tuple[int, ...]:
    return cast("EmbeddedQuantizer", side.quantizer).edges


def _planes(side: SideCodec, number: int) -> int:
    """Of one refinement."""
    return _edges(side)[number] - _edges(side)[number - 1]
