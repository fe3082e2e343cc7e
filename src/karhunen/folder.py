"""An artifact is a folder: `config.json`, readable, and one safetensors file of tables; never pickle.

The configuration names its format, format version and the SHA-256 of the tensors and of its own content, so that a
truncated or altered file is refused. A folder appears whole or not at all.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, TENSORS = "config.json", "tensors.safetensors"


def write_folder(
    folder: Path, format_name: str, version: int, body: Mapping[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write an artifact, replacing one of the same format; ValueError if `folder` holds anything else."""
    check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # layers may share a tensor (one rotation for all); safetensors wants each to have memory of its own
        apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(apart, work / TENSORS)
        hashes = {"tensors_sha256": _sha256(work / TENSORS), "body_sha256": _body_sha256(body)}
        config = {"format": format_name, "version": version, **hashes, **body}
        (work / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        work.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            folder.replace(old / "old")
            work.replace(folder)
            shutil.rmtree(old)
        else:
            work.replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_target(folder: Path) -> None:
    """ValueError if an artifact cannot be written there: ask before long work whose result goes into `folder`."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file())):
        raise ValueError(f"{folder} exists and is not a karhunen artifact; choose another folder")


def read_folder(folder: Path, format_name: str, version: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of an artifact; ValueError saying what is wrong with it."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"no artifact at {folder}: it has no {CONFIG}; make one with `karhunen calibrate`")
    try:
        config = cast("dict[str, Any]", json.loads((folder / CONFIG).read_text()))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{folder / CONFIG} holds no artifact: it is a {type(config).__name__}, not an object")
    if config.get("format") != format_name:
        raise ValueError(f"{folder} holds {config.get('format')!r}, not {format_name!r}")
    if config.get("version") != version:
        raise ValueError(
            f"{folder} has format version {config.get('version')}; this karhunen reads version {version}: make it again"
        )
    path = folder / TENSORS
    if not path.is_file():
        raise ValueError(f"{folder} is incomplete: {TENSORS} is missing")
    if _sha256(path) != config.get("tensors_sha256"):
        raise ValueError(f"{path} is truncated or altered: its SHA-256 is not the one in {CONFIG}; make it again")
    body = {k: v for k, v in config.items() if k not in ("format", "version", "tensors_sha256", "body_sha256")}
    if _body_sha256(body) != config.get("body_sha256"):
        raise ValueError(f"{folder / CONFIG} is altered: its SHA-256 is not the one it names; make it again")
    try:
        return config, load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
