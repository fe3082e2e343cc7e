"""The tables of docs/format.md that code decides, and the picture of a page.

python -m tests.golden.format_tables      writes them into the documentation (with src on PYTHONPATH)
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from tests.synthetic import SMALL, cached, codec, quick, statistics
from torch import Tensor

from karhunen.codec import PART_PACKAGES, Codec
from karhunen.evaluation.results.page_picture import page_figure
from karhunen.fitting import fit
from karhunen.pages import PageCodec
from karhunen.pages.frame import ENTRY_FIELDS, HEADER_FIELDS
from karhunen.quantizers.byte_vq import ByteVQ
from karhunen.quantizers.gains import GAIN_BITS
from karhunen.recipe import Recipe, Side
from karhunen.recipes import names
from karhunen.values import kinds_in

ROOT = Path(__file__).parents[2]
FORMAT = ROOT / "docs" / "format.md"
PICTURE = ROOT / "docs" / "page.png"
WIDTH = {"8s": "8 bytes", "16s": "16 bytes", "B": "uint8", "H": "uint16", "I": "uint32", "Q": "uint64"}


def header_table() -> str:
    return _struct_table(HEADER_FIELDS)


def entry_table() -> str:
    return _struct_table(ENTRY_FIELDS)


def codecs() -> Iterator[Codec]:
    """Of every recipe, and of byte codes with every kind of gain: no recipe's default has one."""
    for name in names():
        yield codec(name)
    for gain in GAIN_BITS:
        side = Side(quantizer=ByteVQ(gain=gain))  # type: ignore[arg-type]
        recipe = quick(Recipe(f"byte codes with gain {gain}", side, side))
        yield fit(recipe, statistics(recipe, SMALL))


def side_tensors() -> dict[str, dict[str, set[str]]]:
    """Quantizer → side tensor → dtypes, from coding a few tokens by every codec."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    key, value = cached(SMALL, 1, 128)
    for made in codecs():
        for layer in made.layers.values():
            for side, x in ((layer.key, key), (layer.value, value)):
                packed = side.encode(x, torch.arange(128)[None])
                found[type(side.quantizer).__name__]["planes"].add(_dtype(packed.planes))
                for tensor, y in packed.side.items():
                    found[type(side.quantizer).__name__][tensor].add(_dtype(y))
    return found


def side_table() -> str:
    rows = [
        f"| `{quantizer}` | `{tensor}` | {', '.join(sorted(dtypes))} |"
        for quantizer, tensors in sorted(side_tensors().items())
        for tensor, dtypes in sorted(tensors.items())
        if tensor != "planes"
    ]
    return "\n".join(["| quantizer | side tensor | dtype |", "|---|---|---|", *rows])


def field_table() -> str:
    """Every class of an artifact: its fields, and of tensors the dtypes that recipes' codecs store."""
    dtypes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for made in codecs():
        _gather(made, dtypes)
    kinds = {name: kind for name, kind in kinds_in(*PART_PACKAGES).items() if name in dtypes}
    rows: list[str] = []
    for name, kind in sorted(kinds.items()):
        shown = [
            f"`{field.name}`" + (f" {', '.join(sorted(found))}" if (found := dtypes[name].get(field.name)) else "")
            for field in fields(kind)
            if field.init
        ]
        rows.append(f"| `{name}` | {'; '.join(shown) or 'none'} |")
    return "\n".join(["| class | fields, and the dtypes of those that are tensors |", "|---|---|", *rows])


TABLES = {"header": header_table, "entry": entry_table, "side": side_table, "fields": field_table}


def written(text: str) -> str:
    """The documentation with every table as code has it now."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table {name}, from code -->\n", f"<!-- end of table {name} -->"
        before, found, rest = text.partition(begin)
        assert found, f"docs/format.md has no place for the table {name}"
        text = f"{before}{begin}{table()}\n{end}{rest.partition(end)[2]}"
    return text


def picture() -> Any:
    maker = PageCodec(codec("karhunen"), torch.float32)
    key, value = cached(SMALL, 1, 256)
    return page_figure(maker, maker.encode({0: (key[0], value[0])}, torch.arange(256)))


def _struct_table(described: tuple[tuple[str, str, str], ...]) -> str:
    rows, at = [], 0
    for name, code, meaning in described:
        rows.append(f"| {at} | {WIDTH[code]} | {name} | {meaning} |")
        at += struct.calcsize(f"<{code}")
    return "\n".join(["| at | as | field | is |", "|---|---|---|---|", *rows])


def _gather(value: Any, dtypes: dict[str, dict[str, set[str]]]) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _gather(item, dtypes)
    elif isinstance(value, tuple):
        for item in value:
            _gather(item, dtypes)
    elif is_dataclass(value) and not isinstance(value, type):
        mine = dtypes[type(value).__name__]
        for field in fields(value):
            inner = getattr(value, field.name)
            if isinstance(inner, Tensor):
                mine[field.name].add(_dtype(inner))
            else:
                _gather(inner, dtypes)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


if __name__ == "__main__":
    FORMAT.write_text(written(FORMAT.read_text(encoding="utf-8")), encoding="utf-8")
    picture().savefig(PICTURE, dpi=110)
