"""The frame of a page: a fixed header that says whose bytes follow, one entry for each layer, then the bytes.

    [ header 136 ][ layer entry, lengths of its parts ] × n_layers [ exact tokens, key parts, value parts ] × n_layers

Everything is little-endian. `read` takes bytes from anywhere: it checks every number against the length that is there
before it uses it, allocates nothing from one, and refuses (ValueError) with what was given and what was wanted.
The checksum guards against damage, not against an enemy: it has no key.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

MAGIC, VERSION = b"KARHPAGE", 1
TOKENS, STATE, REFINEMENT = 0, 1, 2
"""Kinds: tokens of layers that keep keys and values; the state of the other layers; one refinement of such tokens."""
EXACT, CODED = 0, 1  # kinds of a layer
DTYPES = ("float32", "bfloat16", "float16")  # by their number in the header
MAX_TOKENS = 1 << 16  # of a page
SHRUNK = 1 << 31  # in a part's length: its planes are deflated

HEADER_FIELDS = (
    ("magic", "8s", "`KARHPAGE`"),
    ("version", "H", "1"),
    ("kind", "B", "0: tokens, 1: the state of layers that do not keep all their tokens, 2: a refinement"),
    ("dtype", "B", "of exact vectors: 0 float32, 1 bfloat16, 2 float16"),
    ("header bytes", "I", "this header and all layer entries"),
    ("bytes", "Q", "the whole page"),
    ("checksum", "16s", "BLAKE2b-128 of the page, these 16 bytes taken as zeros"),
    ("model", "16s", "BLAKE2b-128 of the codec's `ModelIdentity`, as JSON with sorted keys"),
    ("weights", "16s", "of every weight below the head (`hf.fingerprint`); zeros: unknown, matches any"),
    ("tokenizer", "16s", "BLAKE2b-128 of the tokenizer's definition; zeros: unknown, matches any"),
    ("codec", "16s", "BLAKE2b-128 of the codec's fingerprint"),
    ("layout", "16s", "BLAKE2b-128 of where each side's bytes lie: widths, side tensors, parts"),
    ("first token", "Q", "position of the page's first token; of a state, how many tokens were read before it"),
    ("tokens", "I", "0 of a state"),
    ("layers", "H", "entries that follow"),
    ("refinement", "H", "which, counted from 1; 0 of other kinds"),
)
ENTRY_FIELDS = (
    ("layer", "H", "ascending from entry to entry"),
    ("kind", "B", "0: vectors as they are, 1: coded"),
    ("nothing", "B", "0"),
    ("first head", "H", "of the KV heads held here"),
    ("heads", "H", "how many"),
    ("all heads", "H", "of the layer"),
    ("key parts", "H", "one for each head, or one where heads are coded together"),
    ("value parts", "H", "as above"),
    ("nothing", "H", "0"),
    ("exact", "I", "tokens whose vectors are in the parts as well; of a refinement, those that have it"),
)
HEADER = struct.Struct("<" + "".join(code for _, code, _ in HEADER_FIELDS))
ENTRY = struct.Struct("<" + "".join(code for _, code, _ in ENTRY_FIELDS))
LENGTH = struct.Struct("<I")
CHECKSUM_AT, CHECKSUM_BYTES = 24, 16
UNKNOWN = bytes(16)  # of a fingerprint that was not taken

Bytes = bytes | memoryview


@final
@dataclass(frozen=True)
class Owner:
    """Whose page it is: 16-byte fingerprints. `weights` and `tokenizer` may be unknown and then match any."""

    model: bytes
    weights: bytes
    tokenizer: bytes
    codec: bytes
    layout: bytes

    def mismatch(self, other: "Owner") -> str | None:
        """Why a page of this owner is not one of `other`'s, or None if it is."""
        for name, what in (
            ("model", "another model (architecture, configuration or layer shapes)"),
            ("weights", "other weights of the model"),
            ("tokenizer", "another tokenizer"),
            ("codec", "another codec"),
            ("layout", "another layout of the bytes"),
        ):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and not (name in ("weights", "tokenizer") and UNKNOWN in (mine, theirs)):
                return f"it was made with {what}: {mine.hex()}, this is {theirs.hex()}"
        return None


@final
@dataclass(frozen=True)
class Entry:
    """One layer: heads `first_head` … `first_head + n_heads` of `all_heads`; lengths of its parts, in bytes as they
    lie, the highest bit set where the planes are deflated."""

    layer: int
    kind: int
    first_head: int
    n_heads: int
    all_heads: int
    n_exact: int
    key: tuple[int, ...]
    value: tuple[int, ...]

    @property
    def table_bytes(self) -> int:
        """Of this entry in the header."""
        return ENTRY.size + LENGTH.size * (len(self.key) + len(self.value))

    @property
    def payload_bytes(self) -> int:
        """Of what follows the header for this layer."""
        return LENGTH.size * self.n_exact + sum(length & ~SHRUNK for length in (*self.key, *self.value))

    def pack(self) -> bytes:
        """As it lies in the header."""
        counts = (self.first_head, self.n_heads, self.all_heads, len(self.key), len(self.value), 0, self.n_exact)
        lengths = b"".join(LENGTH.pack(length) for length in (*self.key, *self.value))
        return ENTRY.pack(self.layer, self.kind, 0, *counts) + lengths


@final
@dataclass(frozen=True)
class Section:
    """One layer's bytes: where its exact tokens stand in the page, then the parts of both sides."""

    entry: Entry
    exact: Bytes
    key: tuple[Bytes, ...]
    value: tuple[Bytes, ...]


@final
@dataclass(frozen=True)
class Frame:
    """A page taken apart: its header, and for each layer its entry and bytes (views of the page)."""

    kind: int
    dtype: str
    owner: Owner
    first_token: int
    n_tokens: int
    sections: tuple[Section, ...]
    refinement: int = 0

    @property
    def header_bytes(self) -> int:
        """Before the first layer's bytes."""
        return HEADER.size + sum(section.entry.table_bytes for section in self.sections)

    def write(self) -> bytes:
        """The page: the mirror of `read`."""
        entries = b"".join(section.entry.pack() for section in self.sections)
        payload = b"".join(part for s in self.sections for part in (s.exact, *s.key, *s.value))
        header_bytes, owner = self.header_bytes, self.owner
        header = HEADER.pack(
            *(MAGIC, VERSION, self.kind, DTYPES.index(self.dtype), header_bytes, header_bytes + len(payload), UNKNOWN),
            *(owner.model, owner.weights, owner.tokenizer, owner.codec, owner.layout),
            *(self.first_token, self.n_tokens, len(self.sections), self.refinement),
        )
        return seal(b"".join((header, entries, payload)))


def seal(page: bytes) -> bytes:
    """The page with the checksum of its bytes in place."""
    end = CHECKSUM_AT + CHECKSUM_BYTES
    return page[:CHECKSUM_AT] + _checksum(page) + page[end:]


def read(page: Bytes) -> Frame:
    """A page taken apart without a copy; ValueError, with the reason, if it is damaged or no page."""
    data = memoryview(page).cast("B")
    if len(data) < HEADER.size:
        raise ValueError(f"not a page: {len(data)} bytes, a header alone has {HEADER.size}")
    (magic, version, kind, dtype, header_bytes, n_bytes, checksum, *owner, first, n_tokens, n_layers, number) = (
        HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise ValueError(f"not a page: it begins with {bytes(magic)!r}, a page with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"a page of version {version}; this karhunen reads version {VERSION}: make it again")
    if n_bytes != len(data):
        raise ValueError(f"a damaged page: it says it has {n_bytes} bytes and has {len(data)}; make it again")
    if checksum != _checksum(data):
        raise ValueError("a damaged page: its checksum is not that of its bytes; make it again")
    if kind not in (TOKENS, STATE, REFINEMENT) or dtype >= len(DTYPES) or (kind == REFINEMENT) != (number > 0):
        raise ValueError(f"a page of kind {kind}, dtype {dtype}, refinement {number}: unknown here; make it again")
    if not HEADER.size <= header_bytes <= n_bytes or n_tokens > MAX_TOKENS or first >> 62:
        raise ValueError(
            f"a page with a header of {header_bytes} of its {n_bytes} bytes, {n_tokens} tokens from {first} on; "
            f"a page has at most {MAX_TOKENS} tokens: make it again"
        )
    entries = list(_entries(data[HEADER.size : header_bytes], n_layers, n_tokens))
    if any(a.layer >= b.layer for a, b in pairwise(entries)):
        raise ValueError("a page whose layers are not in order; make it again")
    if header_bytes + sum(entry.payload_bytes for entry in entries) != n_bytes:
        raise ValueError("a page whose parts do not add up to its length; make it again")
    sections = tuple(_sections(data[header_bytes:], entries, n_tokens))
    return Frame(kind, DTYPES[dtype], Owner(*owner), first, n_tokens, sections, number)


def with_sections(frame: Frame, sections: Sequence[Section]) -> Frame:
    """The same tokens of the same owner with other bytes."""
    return replace(frame, sections=tuple(sections))


def _entries(table: memoryview, n_layers: int, n_tokens: int) -> Iterator[Entry]:
    at = 0
    for _ in range(n_layers):
        if at + ENTRY.size > len(table):
            raise ValueError(f"a page that names {n_layers} layers and has no room for them; make it again")
        layer, kind, zero, first, n, every, n_key, n_value, zero2, n_exact = ENTRY.unpack_from(table, at)
        at += ENTRY.size
        n_parts = n_key + n_value
        if at + LENGTH.size * n_parts > len(table) or zero or zero2 or kind not in (EXACT, CODED):
            raise ValueError(f"a page whose entry for layer {layer} does not fit its header; make it again")
        if n_exact > n_tokens or not first + n <= every:
            raise ValueError(
                f"a page with {n_exact} exact of {n_tokens} tokens, heads {first} to {first + n} of {every} in layer "
                f"{layer}; make it again"
            )
        lengths = tuple(LENGTH.unpack_from(table, at + LENGTH.size * i)[0] for i in range(n_parts))
        at += LENGTH.size * n_parts
        yield Entry(layer, kind, first, n, every, n_exact, lengths[:n_key], lengths[n_key:])
    if at != len(table):
        raise ValueError(f"a page with {len(table) - at} bytes of header that belong to no layer; make it again")


def _sections(payload: memoryview, entries: Sequence[Entry], n_tokens: int) -> Iterator[Section]:
    at = 0

    def take(n_bytes: int) -> memoryview:
        nonlocal at
        at += n_bytes
        return payload[at - n_bytes : at]

    for entry in entries:
        exact = take(LENGTH.size * entry.n_exact)
        index = [-1, *(i for (i,) in LENGTH.iter_unpack(exact)), n_tokens]
        if any(a >= b for a, b in pairwise(index)):
            raise ValueError(f"a page whose exact tokens in layer {entry.layer} are not in order; make it again")
        key, value = (tuple(take(n & ~SHRUNK) for n in lengths) for lengths in (entry.key, entry.value))
        yield Section(entry, exact, key, value)


def _checksum(page: Bytes) -> bytes:
    data = memoryview(page)
    digest = hashlib.blake2b(data[:CHECKSUM_AT], digest_size=CHECKSUM_BYTES)
    digest.update(UNKNOWN)
    digest.update(data[CHECKSUM_AT + CHECKSUM_BYTES :])
    return digest.digest()
