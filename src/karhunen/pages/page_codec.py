"""Pages: runs of tokens as byte strings that say whose they are, and stand alone.

keys, values of whole granules ─▶ SideCodec.encode ─▶ parts by head ─▶ frame ─▶ bytes
keys, values                   ◀─ SideCodec.decode ◀─ parts by head ◀─ frame ◀─ bytes

A page needs no exact window and no other page. Tokens that stay exact go inside it: those the codec's rule names and,
in the page that begins a text, the window's sinks. Layers without a codec go in as they are. Layers that do not keep
all their tokens (sliding, linear) have no place in a page.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from karhunen.codec import Codec
from karhunen.pages.frame import DTYPES, REFINEMENT, TOKENS, UNKNOWN, Frame, Owner, read
from karhunen.pages.layer_pages import Refine, decode_layer, encode_layer
from karhunen.pages.plan import KeysValues, PagePlan
from karhunen.values import dismantle


@final
@dataclass(frozen=True)
class PageCodec:
    """Pages of `codec` for vectors of `dtype`.

    `weights` and `tokenizer` are fingerprints, 32 hex digits, or empty where they are not known. `entropy` deflates
    codes where that is smaller; None: as the codec's own layout does. `shard` (i, n) holds part i of n of each layer's
    heads: keys and values of these heads are given and returned.
    """

    codec: Codec
    dtype: torch.dtype = torch.bfloat16
    weights: str = ""
    tokenizer: str = ""
    entropy: bool | None = None
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.dtype_name not in DTYPES:
            raise ValueError(f"pages hold {', '.join(DTYPES)}, not {self.dtype_name}")
        for name, text in (("weights", self.weights), ("tokenizer", self.tokenizer)):
            if len(text) not in (0, 32) or set(text) - set("0123456789abcdef"):
                raise ValueError(f"{name}={text!r} is not a fingerprint; give 32 hex digits, or nothing")
        _ = self.plan  # refuses what cannot be cut into pages

    @cached_property
    def plan(self) -> PagePlan:
        """What its pages are like."""
        return PagePlan(self.codec, self.dtype, self.entropy, self.shard)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of a page: those that keep keys and values of every token."""
        return self.plan.layers

    @property
    def granule_tokens(self) -> int:
        """A page has a multiple of this many tokens, and begins at one."""
        return self.plan.granule_tokens

    @property
    def is_fixed(self) -> bool:
        """Whether `page_bytes` is what every page takes, not a bound: no tokens kept by a rule, no entropy coding."""
        return self.plan.is_fixed

    def page_bytes(self, n_tokens: int, first_token: int = 0) -> int:
        """The most bytes of a page of `n_tokens` from `first_token` on; with `is_fixed`, its bytes."""
        return self.plan.page_bytes(n_tokens, first_token)

    @property
    def dtype_name(self) -> str:
        """As the header counts them."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def owner(self) -> Owner:
        """Whose pages these are; a page of another owner is refused."""
        return Owner(
            model=digest(json.dumps(dismantle(self.codec.model, {}), sort_keys=True)),
            weights=bytes.fromhex(self.weights) or UNKNOWN,
            tokenizer=bytes.fromhex(self.tokenizer) or UNKNOWN,
            codec=digest(self.codec.fingerprint()),
            layout=digest("\n".join(f"{key}: {layout.description}" for key, layout in self.plan.layouts.items())),
        )

    def encode(
        self,
        layers: Mapping[int, KeysValues],
        positions: Int[Tensor, " t"],
        exact: Mapping[int, Bool[Tensor, " t"]] | None = None,
    ) -> bytes:
        """A page of all given layers, or of one: `join_layers` puts pages of single layers together.

        `exact`: which tokens of a layer stay exact, in place of the codec's rule, which needs all heads.
        """
        return self.encode_pages(layers, positions, len(positions), exact)[0]

    def decode(self, page: bytes, layers: Sequence[int] | None = None) -> dict[int, KeysValues]:
        """Keys and values by layer, all or those asked for; ValueError with the reason if the page is refused."""
        return self.decode_pages([page], layers)

    def encode_pages(
        self,
        layers: Mapping[int, KeysValues],
        positions: Int[Tensor, " t"],
        page_tokens: int,
        exact: Mapping[int, Bool[Tensor, " t"]] | None = None,
    ) -> list[bytes]:
        """As many pages of `page_tokens` as the tokens make, coded together: the same bytes as one by one."""
        n_tokens, first = self.plan.checked(layers, positions, page_tokens)
        n_pages = n_tokens // page_tokens
        by_layer = [
            encode_layer(self.plan, layer, layers[layer], positions, page_tokens, (exact or {}).get(layer))
            for layer in sorted(layers)
        ]
        return [
            Frame(
                TOKENS, self.dtype_name, self.owner, first + page * page_tokens, page_tokens,
                tuple(sections[page] for sections in by_layer),
            ).write()
            for page in range(n_pages)
        ]  # fmt: skip

    def decode_pages(self, pages: Sequence[bytes], layers: Sequence[int] | None = None) -> dict[int, KeysValues]:
        """Keys and values of pages that follow each other, as one run of tokens."""
        return dict(self.decode_layers(pages, layers))

    def decode_layers(
        self,
        pages: Sequence[bytes],
        layers: Sequence[int] | None = None,
        refine: Callable[[int], Refine] | None = None,
    ) -> Iterator[tuple[int, KeysValues]]:
        """As `decode_pages`, a layer at a time; all pages are checked before the first. `refine(layer)` is what better
        vectors come from (`RefinedPages`)."""
        frames = [self.open(page) for page in pages]
        if not frames:
            return
        ends = [frame.first_token + frame.n_tokens for frame in frames[:-1]]
        if any(end != frame.first_token for end, frame in zip(ends, frames[1:], strict=True)):
            raise ValueError(f"pages from tokens {[f.first_token for f in frames]} on do not follow each other")
        held = [section.entry.layer for section in frames[0].sections]
        if any([section.entry.layer for section in frame.sections] != held for frame in frames):
            raise ValueError("pages that hold different layers; give pages of the same ones")
        for layer in held if layers is None else layers:
            if layer not in held:
                raise ValueError(f"layer {layer} is not in this page; it holds {held}")
            sections = [frame.sections[held.index(layer)] for frame in frames]
            yield layer, decode_layer(self.plan, layer, frames, sections, refine and refine(layer))

    def open(self, page: bytes) -> Frame:
        """The page taken apart; ValueError with the reason if it is damaged, another owner's, or of other heads."""
        frame = read(page)
        if frame.kind != TOKENS:
            what = "a refinement" if frame.kind == REFINEMENT else "the state of layers"
            raise ValueError(f"this is {what}, not a page of tokens")
        if reason := frame.owner.mismatch(self.owner):
            said = f"; ours is of the codec {self.codec.description}" if frame.owner.codec != self.owner.codec else ""
            raise ValueError(f"a page that is not ours: {reason}{said}")
        if frame.dtype != self.dtype_name:
            raise ValueError(f"a page of {frame.dtype}, not of {self.dtype_name}; make it again, or decode it so")
        self.plan.check_length(frame.n_tokens)
        if frame.first_token % self.granule_tokens:
            raise ValueError(f"a page from token {frame.first_token} on, within a block of {self.granule_tokens}")
        for section in frame.sections:
            self.plan.check_entry(section.entry, frame.n_tokens)
        return frame


def digest(text: str) -> bytes:
    """A fingerprint of 16 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
