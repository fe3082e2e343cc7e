"""Text to calibrate and to evaluate on: the user's files, or what every Python installation has on its shelf.

The default is Python's own language reference (`pydoc_data.topics`), half of its topics for each purpose; a paragraph
that stands in both halves is kept for calibration only.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst", ".py")


def calibration_text() -> str:
    """About 300 kB of technical English with code; the same at every call of one Python version."""
    return "\n\n".join(_paragraphs(0))


def evaluation_text() -> str:
    """Text of the same kind that shares no paragraph with `calibration_text`."""
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
