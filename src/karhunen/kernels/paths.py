"""Which implementations of an op can run here: asked once for each process, since kernels are called for every layer.

An op is a folder of `naive.py` (the definition, plain torch) and compiled twins of the same signature.
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

PATHS = ("naive", "cpu", "gpu")
LIBRARY = {"cpu": "numba", "gpu": "triton"}


@cache
def available(op: str, path: str) -> tuple[bool, str]:
    """Whether a path of `op` (a folder of karhunen.kernels) can run on this machine, and what it found or misses.

    ValueError on an unknown path.
    """
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown; choose one of {PATHS}")
    if path == "naive":
        return True, "plain torch"
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
    """The fastest path of `op` that can run on tensors of this device type, and why that one."""
    path = {"cpu": "cpu", "cuda": "gpu"}.get(device_type)
    if path is None:
        return "naive", f"no kernel is written for device type {device_type!r}"
    runs, reason = available(op, path)
    return path if runs else "naive", reason
