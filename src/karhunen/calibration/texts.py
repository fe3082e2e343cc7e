"""Text to calibrate and to evaluate on: the user's files, or what every Python installation has on its shelf.

Prose is Python's own language reference (`pydoc_data.topics`), half of its topics for each purpose; a paragraph that
stands in both halves is kept for calibration only. Code is the source of the standard library, other modules for each
purpose. The two take turns: statistics of prose alone code source text about 1.3 times worse (docs/log.md).
"""

import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

MODULES = (
    "ast", "calendar", "configparser", "csv", "difflib", "fractions", "gettext", "heapq", "json.decoder", "locale",
    "mailbox", "optparse", "pprint", "random", "shutil", "socketserver", "statistics", "tempfile", "textwrap", "uuid",
)  # fmt: skip
"""To calibrate on; those to evaluate on are others (evaluation/documents.py)."""
TURN_CHARACTERS = 4000  # about a thousand tokens: a sequence of 2,048 holds both kinds
TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst", ".py")


def calibration_text() -> str:
    """About 500 kB of technical English and Python source by turns; the same at every call of one Python version."""
    prose, code = _turns(_paragraphs(0)), _turns(_source_paragraphs())
    return "\n\n".join(part for pair in zip(prose, code, strict=False) for part in pair)


def calibration_prose() -> str:
    """The prose of `calibration_text` alone, about 300 kB: to see what leaving the code out costs."""
    return "\n\n".join(_paragraphs(0))


def calibration_code() -> str:
    """The code of `calibration_text` alone."""
    return "\n\n".join(_source_paragraphs())


def evaluation_text() -> str:
    """Prose of the same kind that shares no paragraph with `calibration_text`."""
    used = set(_paragraphs(0))
    return "\n\n".join(paragraph for paragraph in _paragraphs(1) if paragraph not in used)


def read_texts(paths: Iterable[Path | str]) -> list[str]:
    """Texts of files and, sorted by name, of all text files in folders.

    ValueError for a path that does not exist, is not text, or holds no words.
    """
    files = [file for path in paths for file in _files(Path(path))]
    texts = [_read(file) for file in files]
    if not any(text.strip() for text in texts):
        names = ", ".join(str(file) for file in files) or "no files"
        raise ValueError(f"the calibration text is empty: {names}")
    return [text for text in texts if text.strip()]


@cache
def _paragraphs(half: int) -> tuple[str, ...]:
    from pydoc_data.topics import topics  # half a megabyte: read when asked for

    return tuple(
        paragraph.strip("\n") for name in sorted(topics)[half::2] for paragraph in topics[name].split("\n\n")
        if paragraph.strip()
    )  # fmt: skip


@cache
def _source_paragraphs() -> tuple[str, ...]:
    found: list[str] = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ValueError(f"this Python comes without the source of its module {name}; give a text of your own")
        source = Path(spec.origin).read_text(encoding="utf-8")
        found += [paragraph for paragraph in source.split("\n\n") if paragraph.strip()]
    return tuple(found)


def _turns(paragraphs: tuple[str, ...]) -> Iterator[str]:
    """Neighbouring paragraphs, TURN_CHARACTERS together or a little more."""
    held: list[str] = []
    for paragraph in paragraphs:
        held.append(paragraph)
        if sum(map(len, held)) >= TURN_CHARACTERS:
            yield "\n\n".join(held)
            held = []
    if held:
        yield "\n\n".join(held)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"no such file or folder: {path}")
    found = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not found:
        raise ValueError(f"{path} holds no text files; read are {', '.join(TEXT_SUFFIXES)}")
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
