"""Options that several verbs share, and what reads their words. Nothing heavy is imported here."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Annotated

import typer


def word(text: str) -> str:
    """Anything but nothing, which would stand for the current folder or for no choice at all."""
    if not text:
        raise typer.BadParameter("it is empty; give a value")
    return text


def path(given: str | Path) -> Path:
    """A file or folder; a default comes as what it is."""
    if not str(given):
        raise typer.BadParameter("it is empty; give a path, or `.` for the current folder")
    return Path(given)


def share(given: str | float) -> float:
    """A number above 0 and at most 1."""
    return _number(given, "a number above 0 and at most 1", lambda value: 0 < value <= 1)


def from_0_to_1(given: str | float) -> float:
    """A share that may be nothing or all."""
    return _number(given, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def positive(given: str | float) -> float:
    """A finite number above 0."""
    return _number(given, "a finite number above 0", lambda value: 0 < value < inf)


def not_negative(given: str | float) -> float:
    """A finite number of 0 or more."""
    return _number(given, "a finite number of 0 or more", lambda value: 0 <= value < inf)


def _number(given: str | float, wanted: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(given)
    except ValueError:
        value = nan
    if not fits(value):
        raise typer.BadParameter(f"{given!r} is not {wanted}")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Model = Annotated[str, typer.Option("--model", help="smollm2, gemma3-270m, a folder, or a hub id.", parser=word)]
RecipeText = Annotated[
    str, typer.Option("--recipe", help="A recipe with options, such as spectra:bits=2.", parser=word)
]
Texts = Annotated[
    list[Path] | None, typer.Option("--text", help="A text file or a folder of text files; repeatable.", parser=path)
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Number format of the model: float32, bfloat16 or float16.", parser=word)
]
Devices = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu, cuda, cuda:1, mps, xpu; several with commas, or auto for all there are.",
        parser=word,
    ),
]
OneDevice = Annotated[
    str, typer.Option("--device", help="The device to time: cpu, cuda, cuda:1, mps or xpu.", parser=word)
]
CodecFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A codec's folder, as `calibrate` writes it.", parser=path)
]
DEFAULT_DEVICE = "cpu"
DEFAULT_MODEL = "smollm2"
DEFAULT_RECIPE = "karhunen:bits=2"
DEMO_RECIPE = "karhunen:bits=1.5"  # about 8 times smaller at 4,000 tokens, the exact tokens included
