"""What several verbs begin with: a model and its tokenizer, in a dtype, with the download's progress shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karhunen.cli.screen import Screen

if TYPE_CHECKING:
    from karhunen.hf.model_sources import FetchProgress, Reporter

DTYPES = ("float32", "bfloat16", "float16")


def load_model(screen: Screen, name: str, dtype: str, device_map: Any = None) -> tuple[Any, Any]:
    """Model and tokenizer; ValueError on an unknown dtype, ModelUnavailable if there is no such model."""
    from karhunen.hf.embedded import load

    kind = torch_dtype(dtype)
    with fetching(screen, f"loading {Path(name).name}") as on_fetch:
        return load(name, dtype=kind, progress=on_fetch, device_map=device_map)


def placed(screen: Screen, name: str, dtype: str, devices: tuple[str, ...]) -> Any:
    """Where the weights of a model that only runs go, as `load_model` takes it; of several devices its configuration
    is read first. ValueError where it does not fit."""
    from karhunen.calibration.free_memory import free_bytes
    from karhunen.calibration.placement import place_to_run
    from karhunen.hf.skeleton import skeleton

    if len(devices) == 1:
        return place_to_run(None, devices, {})
    with fetching(screen, f"looking at {Path(name).name}") as on_fetch:
        bare = skeleton(name, torch_dtype(dtype), on_fetch)
    return place_to_run(bare, devices, {device: free_bytes(device) for device in devices})


def torch_dtype(name: str) -> Any:
    """PyTorch's dtype of that name; ValueError if it is none that a model runs in."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    import torch

    return getattr(torch, name)


@contextmanager
def fetching(screen: Screen, waiting: str) -> Iterator["Reporter"]:
    """Shows a download's progress, for the duration."""
    with screen.progress("downloading", "bytes", waiting=waiting) as advance:
        said = ""

        def on_fetch(report: "FetchProgress") -> None:
            nonlocal said
            if report.message != said:
                screen.log(report.message)
                said = report.message
            if report.total_bytes:
                advance(report.done_bytes, report.total_bytes)

        yield on_fetch
