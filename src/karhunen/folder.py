"""An artifact is a folder: `config.json`, readable, and one safetensors file of tables; never pickle.

    .karhunen-new/{tensors.safetensors, config.json}  ─▶  config.json  ─▶  tensors.safetensors

The configuration names its format, format version and the SHA-256 of the tensors and of its own content, so that a
truncated or altered file is refused. A new one takes the old one's place in one step, the second of the three: a reader
takes the tensors that the configuration names, wherever a killed writer left them. Nothing else is ever removed: a
folder that holds other things is refused.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, TENSORS = "config.json", "tensors.safetensors"
NEW = ".karhunen-new"  # a folder for what is being written
FORMATS = "karhunen-"  # how every format of ours begins
READ_ATTEMPTS = 10  # where the artifact is replaced while it is read
SHOWN_NAMES = 3


def write_folder(
    folder: Path, format_name: str, version: int, body: Mapping[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write an artifact, replacing one of the same format. Artifacts in folders inside it stay, and a link to a folder
    stays a link. ValueError if the folder holds anything else, or cannot be written."""
    folder = folder.resolve()
    check_target(folder, format_name)
    # layers may share a tensor (one rotation for all); safetensors wants each to have memory of its own
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    new = folder / NEW
    try:
        with _made(folder), _alone(folder):
            _finish(folder)
            try:
                _save(new, format_name, version, body, apart)
                (new / CONFIG).replace(folder / CONFIG)
                (new / TENSORS).replace(folder / TENSORS)
            finally:
                _finish(folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {folder}: {error}; what was there before is still whole") from error


def named_folder(given: object) -> Path:
    """The folder a caller names; TypeError or ValueError for what names none: nothing is not the current folder."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"folder is a {type(given).__name__}, not a path; give that of a folder")
    if not str(given):
        raise ValueError("the path is empty; give that of a folder, or `.` for the current one")
    return Path(cast("str", given))


def check_target(folder: Path, format_name: str) -> None:
    """ValueError if an artifact cannot be written there: ask before long work whose result goes into `folder`."""
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; an artifact is a folder, so choose another place")
    if foreign := _foreign(folder, format_name):
        more = f" and {len(foreign) - SHOWN_NAMES} more" if len(foreign) > SHOWN_NAMES else ""
        raise ValueError(
            f"{folder} holds {', '.join(foreign[:SHOWN_NAMES])}{more}, which no {format_name} consists of; "
            "choose a new or empty folder, or one that holds nothing else"
        )
    check_writable(folder)


def check_new(folder: Path) -> None:
    """ValueError unless the folder is new or empty, and can be written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose another folder")
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """ValueError if no file can be made there. Tries it, and leaves nothing behind."""
    try:
        with _made(folder, keep=False), tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}; choose another folder") from error


def remove_folder(folder: Path, format_name: str) -> None:
    """Remove an artifact, and the folder if it holds nothing else; what is no artifact of this format stays."""
    if _format_of(folder) != format_name:
        return
    _finish(folder)
    for name in (CONFIG, TENSORS):  # the configuration first: without it there is none
        (folder / name).unlink(missing_ok=True)
    _remove_if_empty(folder)


def open_to_readers(folder: Path) -> None:
    """Give every file the permissions that a new one gets here: safetensors makes files that only their owner reads."""
    probe = folder / ".karhunen-probe"
    probe.touch()
    usual = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(usual)


def read_folder(folder: Path, format_name: str, *versions: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of an artifact of one of these versions; ValueError saying what is wrong with it."""
    for _ in range(READ_ATTEMPTS):
        before = _state(folder / CONFIG)
        config = _read_config(folder)
        _check_config(folder, config, format_name, versions)
        if (tensors := _tensors_named(folder, config)) is not None:
            return config, tensors
        if _state(folder / CONFIG) != before:
            continue  # another one took its place meanwhile
        if not (folder / TENSORS).is_file():
            raise ValueError(f"{folder} is incomplete: {TENSORS} is missing")
        raise ValueError(
            f"{folder / TENSORS} is truncated or altered: its SHA-256 is not the one in {CONFIG}; make it again"
        )
    raise ValueError(f"{folder} is written again and again while it is read; wait for the writer to end")


def _check_config(folder: Path, config: dict[str, Any], format_name: str, versions: tuple[int, ...]) -> None:
    if "format" not in config:
        raise ValueError(f"{folder} holds no {format_name}: its {CONFIG} is another program's, such as a model's")
    if config.get("format") != format_name:
        raise ValueError(f"{folder} holds {config.get('format')!r}, not {format_name!r}")
    found = config.get("version")
    if type(found) is not int or found not in versions:
        read = f"version{'s' if len(versions) > 1 else ''} {' and '.join(map(str, versions))}"
        newer = "install a newer one, or " if isinstance(found, int) and found > max(versions) else ""
        raise ValueError(f"{folder} has format version {found}; this karhunen reads {read}: {newer}make it again")
    body = {k: v for k, v in config.items() if k not in ("format", "version", "tensors_sha256", "body_sha256")}
    if _body_sha256(body) != config.get("body_sha256"):
        raise ValueError(f"{folder / CONFIG} is altered: its SHA-256 is not the one it names; make it again")


def _tensors_named(folder: Path, config: dict[str, Any]) -> dict[str, Tensor] | None:
    """What the file holds that the configuration names; None if no file is it, or one was replaced meanwhile."""
    for path in (folder / TENSORS, folder / NEW / TENSORS, folder / TENSORS):  # it may get its name between two looks
        try:
            before = _state(path)
            if _sha256(path) == config.get("tensors_sha256"):
                tensors = load_file(path)
                if _state(path) == before:
                    return tensors
        except FileNotFoundError:
            continue
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return None


def _state(path: Path) -> tuple[int, int] | None:
    """Tells a file from one that took its place; None if there is none."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"no artifact at {folder}: it has no {CONFIG}; make one with `karhunen calibrate`")
    text = _text_of(folder / CONFIG)
    try:
        config = cast("dict[str, Any]", json.loads(text, object_pairs_hook=_without_doubles))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{folder / CONFIG} holds no artifact: it is a {type(config).__name__}, not an object")
    return config


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """ValueError on a key that is there twice: programs differ in which of the two they take."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def format_of(folder: Path) -> str:
    """Which artifact of ours a folder says it holds, such as karhunen-codec; empty if none."""
    found = _format_of(folder)
    return found if found.startswith(FORMATS) else ""


def _format_of(folder: Path) -> str:
    """What its configuration says the folder holds; empty if it says nothing."""
    try:
        return str(_read_config(folder).get("format", ""))
    except (ValueError, OSError):
        return ""


def _foreign(folder: Path, format_name: str) -> list[str]:
    """Names in the folder of what is neither part of an artifact of the format nor an artifact of ours in a folder."""
    if not folder.is_dir():
        return []
    ours = {NEW}
    if _format_of(folder) == format_name:
        ours |= {CONFIG, TENSORS}
    return sorted(
        f"{path.name}/" if path.is_dir() else path.name
        for path in folder.iterdir()
        if path.name not in ours and not (path.is_dir() and _format_of(path).startswith(FORMATS))
    )


def _save(new: Path, format_name: str, version: int, body: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Both files in a new folder."""
    new.mkdir()
    save_file(tensors, new / TENSORS)
    open_to_readers(new)
    hashes = {"tensors_sha256": _sha256(new / TENSORS), "body_sha256": _body_sha256(body)}
    said = {"format": format_name, "version": version, **hashes, **body}
    (new / CONFIG).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def _finish(folder: Path) -> None:
    """Clear away what a writer left: its tensors get their name if they count already, the rest is removed."""
    new = folder / NEW
    if not new.is_dir():
        return
    there = (new / TENSORS).is_file() and (folder / CONFIG).is_file()
    if there and _read_config(folder).get("tensors_sha256") == _sha256(new / TENSORS):
        (new / TENSORS).replace(folder / TENSORS)
    for path in new.iterdir():  # files of ours, and those that safetensors writes under passing names
        path.unlink()
    new.rmdir()


@contextmanager
def _made(folder: Path, keep: bool = True) -> Iterator[None]:
    """The folder, and those above it, are there; what was made for it goes again if it is empty in the end."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as undo:
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            undo.callback(_remove_if_empty, path)
        yield
        if keep:
            undo.pop_all()


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One writer at a time, where the system can lock a folder; the lock goes with the process."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: two writers of one artifact are on their own
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
