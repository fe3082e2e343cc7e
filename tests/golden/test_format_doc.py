"""docs/format.md says what code does: its tables are those that code makes, its sections name the dtypes stored."""

import re
import struct

import pytest
from tests.golden.format_tables import FORMAT, PICTURE, TABLES, picture, side_tensors, written

from karhunen import codec
from karhunen.hf import session
from karhunen.pages import frame
from karhunen.pages.frame import ENTRY_FIELDS, HEADER_FIELDS
from karhunen.statistics import artifact

AGAIN = "run `PYTHONPATH=src python -m tests.golden.format_tables`"
TEXT = FORMAT.read_text(encoding="utf-8")


def test_every_table_is_the_one_that_code_makes() -> None:
    assert written(TEXT) == TEXT, AGAIN
    assert len(TABLES) == 4


def test_the_versions_that_are_written_are_those_that_are_described() -> None:
    assert f"Codecs and sessions are of format version {codec.VERSION}, statistics and pages of version 1." in TEXT
    assert {artifact.VERSION, frame.VERSION} == {1}
    assert (session.VERSION, session.READ) == (codec.VERSION, codec.READ)
    older = ", ".join(f"`{version}`" for version in codec.READ if version != codec.VERSION)
    said = f"of a codec or session `{codec.VERSION}`, of others `1`. Their readers take {older} as well"
    assert f"| `version` | {said}" in TEXT


SIDES = side_tensors()


@pytest.mark.parametrize("quantizer", sorted(name for name, tensors in SIDES.items() if len(tensors) > 1))
def test_a_quantizers_section_names_its_side_tensors_and_their_dtypes(quantizer: str) -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    mine = [section for section in sections if f"`{quantizer}`" in section.partition("\n")[0]]
    assert len(mine) == 1, f"docs/format.md has {len(mine)} sections whose title names {quantizer}"
    gains = next(section for section in sections if section.startswith("Gains"))
    for tensor, dtypes in SIDES[quantizer].items():
        if tensor == "planes":
            assert dtypes == {"uint8"}
            continue
        assert f"`{tensor}`" in mine[0], f"{quantizer}: {tensor} is not described"
        for dtype in dtypes:
            words = {"uint8": "one byte"}.get(dtype, dtype)
            assert re.search(rf"\b{words}\b", mine[0] + (gains if tensor == "gain" else "")), f"{quantizer}: {dtype}"


def test_the_picture_of_a_page_is_drawn_by_code() -> None:
    figure = picture()
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == [
        "header, to scale", "entry, to scale", "the bytes of one page of 256 tokens, to scale",
    ]  # fmt: skip
    texts = [text.get_text().replace("\n", " ") for axes in figure.axes for text in axes.texts]
    assert any(text.startswith("checksum 16") for text in texts)
    assert any(text.startswith("planes (codes)") for text in texts)
    assert PICTURE.is_file(), AGAIN
    for axes, sizes in zip(figure.axes[:2], (HEADER_FIELDS, (*ENTRY_FIELDS, *[("length", "I", "")] * 4)), strict=True):
        n_bytes = [struct.calcsize(f"<{code}") for _, code, _ in sizes]
        assert [patch.get_width() for patch in axes.patches] == n_bytes, "a row is to scale"
    assert sum(patch.get_width() for patch in figure.axes[2].patches) == int(
        figure.axes[2].get_title(loc="left").rpartition(": ")[2].replace(",", "")
    )
