"""The frame, byte by byte; and what is damaged, cut short, or made up is refused, whatever it says of itself."""

import hashlib
import random
import struct
from dataclasses import replace

import pytest
import torch
from tests.pages.test_page_codec import given, pages_of

from karhunen.fitting import fit
from karhunen.pages import PageCodec
from karhunen.pages.frame import CODED, EXACT, HEADER, SHRUNK, TOKENS, Entry, Frame, Owner, Section, read, seal
from karhunen.recipes import make
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import LayerShape, ModelIdentity

OWNER = Owner(b"M" * 16, b"W" * 16, b"T" * 16, b"C" * 16, b"L" * 16)
TWO = Frame(
    TOKENS,
    "bfloat16",
    OWNER,
    512,
    16,
    (
        Section(Entry(3, CODED, 0, 2, 4, 1, (2, 3), (1 | SHRUNK,)), b"\x05\0\0\0", (b"ab", b"cde"), (b"f",)),
        Section(Entry(7, EXACT, 1, 1, 2, 0, (2,), (1,)), b"", (b"gh",), (b"i",)),
    ),
)

FROZEN = (
    "4b41524850414745" "0100" "00" "01" "c4000000" "d100000000000000"  # magic, version, kind, dtype, header, length
    "{checksum}"
    + "4d" * 16 + "57" * 16 + "54" * 16 + "43" * 16 + "4c" * 16  # model, weights, tokenizer, codec, layout
    + "0002000000000000" "10000000" "0200" "0000"  # first token, tokens, layers, nothing
    "0300" "01" "00" "0000" "0200" "0400" "0200" "0100" "0000" "01000000" "02000000" "03000000" "01000080"
    "0700" "00" "00" "0100" "0100" "0200" "0100" "0100" "0000" "00000000" "02000000" "01000000"
    "05000000" "6162" "636465" "66" "6768" "69"  # exact tokens, keys, values; keys, values
)  # fmt: skip


def test_the_frame_is_frozen_byte_by_byte() -> None:
    page = TWO.write()
    checksum = "4ffe5ba5"
    assert page.hex() == FROZEN.format(checksum=page[24:40].hex())
    assert page[24:28].hex() == checksum
    assert HEADER.size == 136
    again = read(page)
    assert again == TWO
    assert again.write() == page


def test_the_page_of_an_untrained_codec_is_frozen() -> None:
    model = ModelIdentity("golden", "c", "w", (LayerShape("full", 2, 2, 32, 32),))
    maker = PageCodec(fit(make("int4", recent=0), Statistics(model, {0: LayerStatistics()})), torch.float32)
    x = torch.tensor([((i + 1) * 2654435761 >> 11) % 1024 - 512 for i in range(2 * 16 * 32)]).reshape(2, 16, 32) / 64
    page = maker.encode({0: (x, -x)}, torch.arange(16))
    payload = page[read(page).header_bytes :]
    assert (len(page), hashlib.sha256(payload).hexdigest()[:16]) == (3516, "e83f082a337876e6")


def test_ten_thousand_damaged_pages_are_all_refused() -> None:
    """Bytes changed, cut off, put in, moved or taken out."""
    maker, rng = pages_of("karhunen", entropy=True), random.Random(0)
    page = maker.encode({0: given(64)}, torch.arange(64))
    for _ in range(10_000):
        damaged = bytearray(page)
        kind, at = rng.randrange(5), rng.randrange(len(page))
        if kind == 0:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del damaged[at:]
        elif kind == 2:
            damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            damaged[at : at + 8] = rng.randbytes(len(damaged[at : at + 8]))
        else:
            del damaged[at : at + rng.randrange(1, 9)]
        if damaged != page:
            with pytest.raises(ValueError, match="page"):
                maker.decode(bytes(damaged))


@pytest.mark.parametrize("name", ["int4", "karhunen", "kvtc", "kitty", "kvquant", "full"])
def test_pages_that_are_made_up_and_sealed_are_refused_or_are_pages(name: str) -> None:
    """With a right checksum over wrong numbers: no other exception, no more memory than the page has bytes for."""
    maker, rng = pages_of(name), random.Random(1)
    page = maker.encode({0: given(64)}, torch.arange(64))
    refused = 0
    for i in range(400):
        made = bytearray(page)
        end = HEADER.size + 40 if i % 2 else len(page)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(8 if i % 4 else 120, end)
            made[at] = rng.randrange(256)
        if i % 3 == 0:
            made[16:24] = struct.pack("<Q", len(made))
        try:
            got = maker.decode(seal(bytes(made)))
        except ValueError:
            refused += 1
        else:
            assert all(x.shape[1] == read(seal(bytes(made))).n_tokens for pair in got.values() for x in pair)
    assert refused > 100


def test_numbers_too_large_for_the_page_are_refused_before_anything_is_allocated() -> None:
    page = bytearray(pages_of("int4").encode({0: given(64)}, torch.arange(64)))
    tokens_at = HEADER.size - 8
    for n_tokens in (1 << 16, (1 << 32) - 1):
        page[tokens_at : tokens_at + 4] = struct.pack("<I", n_tokens)
        with pytest.raises(ValueError, match="page"):
            pages_of("int4").decode(seal(bytes(page)))
    for data in (b"", b"KARHPAGE", bytes(200), b"not a page at all" * 20):
        with pytest.raises(ValueError, match="not a page"):
            read(data)


def test_a_stream_that_inflates_to_more_than_its_planes_is_refused() -> None:
    import zlib

    maker = pages_of("kvtc")
    frame = read(maker.encode({0: given(64)}, torch.arange(64)))
    (section,) = frame.sections
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = coder.compress(bytes(100_000_000)) + coder.flush()
    part = struct.pack("<I", len(bomb)) + bomb
    entry = replace(section.entry, key=(len(part) | SHRUNK,))
    made = replace(frame, sections=(replace(section, entry=entry, key=(part,)),)).write()
    with pytest.raises(ValueError, match="does not inflate to"):
        maker.decode(made)


def test_a_page_of_another_version_says_which_one_is_read() -> None:
    page = bytearray(TWO.write())
    page[8] = 9
    with pytest.raises(ValueError, match="version 9; this karhunen reads version 1"):
        read(seal(bytes(page)))
