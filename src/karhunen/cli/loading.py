"""What several verbs begin with: a model and its tokenizer, in a dtype, with the download's progress shown."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from karhunen.cli.screen import Screen

if TYPE_CHECKING:
    from karhunen.hf.model_sources import FetchProgress

DTYPES = ("float32", "bfloat16", "float16")


def load_model(screen: Screen, name: str, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer; ValueError on an unknown dtype, ModelUnavailable if there is no such model."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    import torch

    from karhunen.hf.embedded import load

    with screen.progress("downloading", "bytes", waiting=f"loading {Path(name).name}") as advance:
        said = ""

        def on_fetch(report: "FetchProgress") -> None:
            nonlocal said
            if report.message != said:
                screen.log(report.message)
                said = report.message
            if report.total_bytes:
                advance(report.done_bytes, report.total_bytes)

        return load(name, dtype=getattr(torch, dtype), progress=on_fetch)
