"""Pages of progressive tokens: any first few refinements decode, any is dropped unread, damage is refused."""

from dataclasses import replace

import pytest
import torch
from tests.progressive import codec
from tests.synthetic import SMALL, cached, seeded
from tests.synthetic import codec as plain
from torch import Tensor

from karhunen.codec import Packed
from karhunen.pages import PageCodec, RefinedPages, base_codec, page_keys, refinement_key
from karhunen.pages.frame import Frame, read
from karhunen.quantizers.embedded import EmbeddedQuantizer
from karhunen.stores import MemoryStore

N, N_PAGES, N_SINK = 32, 3, 3
AT = torch.arange(N * N_PAGES)


@pytest.fixture(scope="module")
def maker() -> RefinedPages:
    return RefinedPages(codec(), torch.float32)


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, Tensor]:
    key, value = cached(SMALL, 1, N * N_PAGES)
    return key[0], value[0]


@pytest.fixture(scope="module")
def classes() -> Tensor:
    """The last page has none of the second refinement."""
    found = torch.randint(0, 3, (N * N_PAGES,), generator=seeded(6))
    found[-N:].clamp_(max=1)
    return found


@pytest.fixture(scope="module")
def pages(maker: RefinedPages, given: tuple[Tensor, Tensor], classes: Tensor) -> list[list[bytes]]:
    return maker.encode_pages({0: given}, AT, N, {0: classes})


def expected(given: tuple[Tensor, Tensor], classes: Tensor) -> list[Tensor]:
    """Every token encoded whole and cut to its class; sinks are exact."""
    found = []
    for slot, x in zip(("key", "value"), given, strict=True):
        side = codec().layers[0].side(slot)  # type: ignore[arg-type]
        assert isinstance(side.quantizer, EmbeddedQuantizer)
        planes, out = side.encode(x[None], AT[None]).planes, x.clone()
        for n_layers, n in enumerate(side.quantizer.edges):
            cut = side.decode(Packed(planes[:, :n], {}), AT[None])[0].to(x.dtype)
            out = torch.where((classes == n_layers)[None, :, None], cut, out)
        out[:, :N_SINK] = x[:, :N_SINK]
        found.append(out)
    return found


def test_any_first_few_refinements_decode(
    maker: RefinedPages, given: tuple[Tensor, Tensor], classes: Tensor, pages: list[list[bytes]]
) -> None:
    """So a prefix can be used from its bases on, while refinements still arrive, page by page."""
    assert [len(page) for page in pages] == [3, 3, 2]
    for there in ((3, 3, 2), (1, 1, 1), (2, 2, 2), (3, 1, 2)):
        most = torch.tensor(there).repeat_interleave(N) - 1
        want = expected(given, classes.minimum(most))
        got = maker.decode_pages([page[:n] for page, n in zip(pages, there, strict=True)])[0]
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_the_base_is_a_page_like_any_and_all_are_of_one_size(
    maker: RefinedPages, given: tuple[Tensor, Tensor], pages: list[list[bytes]]
) -> None:
    alone = PageCodec(base_codec(codec()), torch.float32)
    assert alone.encode_pages({0: given}, AT, N) == [page[0] for page in pages]
    assert len({len(page[0]) for page in pages[1:]}) == 1


def test_every_byte_of_a_refinement_is_accounted_for(classes: Tensor, pages: list[list[bytes]]) -> None:
    edges = [codec().layers[0].side(slot).quantizer.edges for slot in ("key", "value")]  # type: ignore[attr-defined, arg-type]
    for page, start in zip(pages, range(0, N * N_PAGES, N), strict=True):
        here = classes[start : start + N].clone()
        here[: max(0, N_SINK - start)] = 0
        for number, more in enumerate(page[1:], start=1):
            n = int((here >= number).sum())
            assert len(more) == read(more).header_bytes + n * (4 + sum(e[number] - e[number - 1] for e in edges))


def test_a_store_drops_a_refinement_without_reading_it(maker: RefinedPages, pages: list[list[bytes]]) -> None:
    store, keys = MemoryStore(1 << 20), page_keys(b"owner", AT.tolist(), N)
    for key, page in zip(keys, pages, strict=True):
        store.put(key, page[0])
        for number, more in enumerate(page[1:], start=1):
            store.put(refinement_key(key, number), more)
    store.remove(refinement_key(keys[0], 1))
    found = []
    for key in keys:
        there = [store.get(key), *(store.get(refinement_key(key, number)) for number in (1, 2))]
        found.append([data for data in there[: there.index(None) if None in there else None] if data is not None])
    assert [len(page) for page in found] == [1, 3, 2]
    want = maker.decode_pages([pages[0][:1], *pages[1:]])[0]
    assert all(torch.equal(x, y) for x, y in zip(maker.decode_pages(found)[0], want, strict=True))


def test_damaged_and_misplaced_refinements_are_refused(
    maker: RefinedPages, given: tuple[Tensor, Tensor], classes: Tensor, pages: list[list[bytes]]
) -> None:
    base, first, second = pages[0]

    def changed(page: bytes, **fields: object) -> bytes:
        return replace(read(page), **fields).write()  # type: ignore[arg-type]

    def emptied(frame: Frame) -> tuple[object, ...]:
        section = frame.sections[0]
        entry = replace(section.entry, n_exact=0, key=(0,), value=(0,))
        return (replace(section, entry=entry, exact=b"", key=(b"",), value=(b"",)),)

    def short(frame: Frame) -> tuple[object, ...]:
        section = frame.sections[0]
        entry = replace(section.entry, key=(section.entry.key[0] - 1,))
        return (replace(section, entry=entry, key=(section.key[0][:-1],)),)

    for page, words in (
        ([], "without its base"),
        ([first], "this is a refinement, not a page of tokens"),
        ([base, second], "refinement 2 where refinement 1 belongs"),
        ([base, base], "a page of kind 0 where refinement 1 belongs"),
        ([base, first[:-1]], "damaged"),
        ([base, first[:200] + bytes([first[200] ^ 1]) + first[201:]], "checksum"),
        ([base, pages[1][1]], "a refinement of tokens 32 to 64"),
        ([base, changed(first, owner=replace(read(first).owner, codec=bytes(16)))], "not ours"),
        ([base, changed(first, sections=())], "of other layers"),
        ([base, changed(first, sections=short(read(first)))], "belong; make it again"),
        ([base, changed(first, sections=emptied(read(first))), second], "that have none before it"),
        ([base, changed(first, refinement=0)], "unknown here"),
    ):
        with pytest.raises(ValueError, match=words):
            maker.decode_pages([page])
    for wrong in ({}, {0: classes - 1}, {0: classes + 1}):
        with pytest.raises(ValueError, match="classes of layer 0"):
            maker.encode_pages({0: given}, AT, N, wrong)
    with pytest.raises(ValueError, match="have one rate and no refinements"):
        base_codec(plain("int4"))
