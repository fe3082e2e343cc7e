"""What karhunen finds on this machine: versions, devices, live fast paths, embedded models.

Nothing is downloaded; the package index is asked only if the caller wants it.
"""

import importlib
import os
import pkgutil
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch

from karhunen import kernels
from karhunen.device import HOST, computes_float64, present
from karhunen.hf.embedded import MODELS, default_cache_dir, is_cached
from karhunen.kernels.paths import PATHS, fastest

PACKAGES = (
    "karhunen",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "numba",
    "triton",
    "typer",
    "rich",
)
INDEX_TIMEOUT_SECONDS = 60


@final
@dataclass(frozen=True)
class FastPath:
    """One way to run one kernel, whether it can run here, and what was found or is missing."""

    kernel: str
    path: str
    live: bool
    reason: str


@final
@dataclass(frozen=True)
class AttentionOn:
    """How a coded cache is read on one type of device, and why so."""

    device: str
    path: str
    reason: str


@final
@dataclass(frozen=True)
class EmbeddedModel:
    """One embedded model, and whether it lies ready in the cache folder."""

    name: str
    description: str
    ready: bool


@final
@dataclass(frozen=True)
class Environment:
    """All of it. A version is None where the package is missing; `index` is None where nobody asked."""

    python: str
    platform: str
    versions: dict[str, str | None]
    devices: tuple[str, ...]
    n_cpus: int
    n_threads: int
    attention: tuple[AttentionOn, ...]
    fast_paths: tuple[FastPath, ...]
    cache_folder: Path
    models: tuple[EmbeddedModel, ...]
    index: tuple[bool, str] | None


def environment(online: bool = False) -> Environment:
    """Look around; with `online`, ask the configured package index for the default model's package."""
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: _version(name) for name in PACKAGES},
        devices=_devices(),
        n_cpus=os.cpu_count() or 1,
        n_threads=torch.get_num_threads(),
        attention=tuple(_attention_on(kind) for kind in dict.fromkeys(name.split(":")[0] for name in _devices())),
        fast_paths=tuple(_fast_paths()),
        cache_folder=default_cache_dir(),
        models=tuple(EmbeddedModel(s.name, s.description, is_cached(s.name)) for s in MODELS.values()),
        index=ask_index() if online else None,
    )


def ask_index() -> tuple[bool, str]:
    """Whether pip finds the default model's package in its configured index, and what it said."""
    requirement = next(iter(MODELS.values())).requirements[0]
    package = requirement.split("==")[0]
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INDEX_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {INDEX_TIMEOUT_SECONDS} s"
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
    return (True, lines[0] if lines else package) if done.returncode == 0 else (False, errors[-1])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> tuple[str, ...]:
    kinds = present()
    found = [kind if n == 1 else f"{kind}, {n} of them" for kind, n in kinds.items() if kind != "cuda"]
    for i in range(kinds.get("cuda", 0)):
        properties: Any = torch.cuda.get_device_properties(i)
        found.append(f"cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return tuple(found)


def _attention_on(kind: str) -> AttentionOn:
    device = torch.device(kind)
    if not computes_float64(device):
        return AttentionOn(kind, "decoded", f"{kind} has no float64, so vectors are coded and decoded on the host")
    path, reason = fastest("scan_attention", kind)
    return AttentionOn(kind, path, reason if kind == HOST.type else f"{reason}; its speed has not been measured")


def _fast_paths() -> list[FastPath]:
    found: list[FastPath] = []
    for info in pkgutil.iter_modules(kernels.__path__):
        if not info.ispkg:
            continue
        module: Any = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for path in PATHS if hasattr(module, "available") else ():  # what ops share has none
            try:
                live, reason = module.available(path)
            except ImportError as error:
                live, reason = False, str(error)
            found.append(FastPath(info.name, path, live, reason))
    return found
