"""Which implementations of an op can run here: asked once for each process, since kernels are called for every layer.

An op is a folder of `naive.py` (the definition, plain torch) and compiled twins of the same signature; it need not have
all of them. `forced` takes one path whatever the device, to test and to time it.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType

PATHS = ("naive", "cpu", "gpu")
LIBRARY = {"cpu": "numba", "gpu": "triton"}
NATIVE = {"cpu": "cpu", "cuda": "gpu"}
"""The compiled path of a device type."""

_FORCED: ContextVar[str | None] = ContextVar("forced", default=None)


@cache
def available(op: str, path: str) -> tuple[bool, str]:
    """Whether a path of `op` (a folder of karhunen.kernels) can run on this machine, and what it found or misses.

    ValueError on an unknown path.
    """
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown; choose one of {PATHS}")
    if path == "naive":
        return True, "plain torch"
    if not _is_written(op, path):
        return False, f"no {path.upper()} kernel is written for {op}"
    if importlib.util.find_spec(LIBRARY[path]) is None:
        return False, f"{LIBRARY[path]} is not installed"
    return implementation(op, path).available()


def require(op: str, path: str) -> ModuleType:
    """The implementation of `op` on that path; RuntimeError with the reason if it cannot run here."""
    runs, reason = available(op, path)
    if not runs:
        raise RuntimeError(f"path={path!r} cannot run here: {reason}; path='naive' runs anywhere")
    return implementation(op, path)


@cache
def implementation(op: str, path: str) -> ModuleType:
    """The module `karhunen.kernels.op.path`."""
    return importlib.import_module(f"karhunen.kernels.{op}.{path}")


def fastest(op: str, device_type: str) -> tuple[str, str]:
    """The fastest path of `op` that can run on tensors of this device type, and why that one. Inside `forced` the path
    asked for, even where it cannot run; `naive` of an op that has no such path."""
    if (path := _FORCED.get()) is not None:
        return (path, "forced") if _is_written(op, path) else ("naive", f"no {path.upper()} kernel is written for {op}")
    path = NATIVE.get(device_type)
    if path is None:
        return "naive", f"no kernel is written for device type {device_type!r}"
    runs, reason = available(op, path)
    return path if runs else "naive", reason


@contextmanager
def forced(path: str) -> Iterator[None]:
    """Every op takes this path inside, on tensors of any device: `gpu` on the CPU's under Triton's interpreter, `naive`
    to compare with. Nothing falls back: an op whose path cannot run here raises RuntimeError when it is called.
    ValueError on an unknown path."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown; choose one of {PATHS}")
    token = _FORCED.set(path)
    try:
        yield
    finally:
        _FORCED.reset(token)


@cache
def _is_written(op: str, path: str) -> bool:
    return path == "naive" or importlib.util.find_spec(f"karhunen.kernels.{op}.{path}") is not None
