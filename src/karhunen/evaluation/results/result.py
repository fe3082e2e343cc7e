"""A result is one JSON file, named by the fingerprint of its configuration; it exists whole or not at all.

results/<model>/<task>/<recipe>@<rate>-<fingerprint>.json
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from karhunen.evaluation.results.result_shape import check_shape

FORMAT, VERSION = "karhunen-result", 1

Result = dict[str, Any]


def fingerprint_of(configuration: Mapping[str, Any]) -> str:
    """Twelve hex digits of the configuration's canonical JSON."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]


def path_of(folder: Path, configuration: Mapping[str, Any]) -> Path:
    """Where the result of a configuration is kept."""
    rate = configuration["rate"]
    name = f"{configuration['recipe']}@{'own' if rate is None else rate}-{fingerprint_of(configuration)}.json"
    return folder / _safe(configuration["model"]) / _safe(configuration["task"]["name"]) / name


def write_result(folder: Path, configuration: Mapping[str, Any], body: Mapping[str, Any]) -> Path:
    """Write it by way of a file beside it, so that a killed process leaves no half of it."""
    path = path_of(folder, configuration)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint_of(configuration)}
    text = json.dumps({**head, "configuration": configuration, **body}, indent=1, allow_nan=False) + "\n"
    text = re.sub(r"\n\s+(?=-?[\d.]+(e-?\d+)?,?\n)", " ", text)  # one line for a list of numbers
    text = re.sub(r"(?<=[\d])\n\s+\]", "]", text)
    handle, work = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(work).chmod(0o644)
        Path(work).replace(path)
    finally:
        Path(work).unlink(missing_ok=True)
    return path


def read_result(path: Path) -> Result:
    """ValueError naming the file if it is no result of this version, or a damaged one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ValueError(f"{path} is no {FORMAT} of version {VERSION}; evaluate again")
    result = cast("Result", found)
    try:
        check_shape(result)
        if result["fingerprint"] != fingerprint_of(result["configuration"]):
            raise ValueError("its configuration is not the one that its fingerprint names")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; evaluate again") from error
    return result


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def read_results(folder: Path) -> list[Result]:
    """All results below a folder, in order of path; ValueError if there is none."""
    if folder.is_file():
        return [read_result(folder)]
    found = [read_result(path) for path in sorted(folder.rglob("*.json")) if _is_result(path)]
    if not found:
        raise ValueError(f"{folder} holds no results; make some with `karhunen evaluate`")
    return told_apart(found)


def told_apart(results: list[Result]) -> list[Result]:
    """The same, where results that differ only in their calibration have it in their text: two rows, not one."""

    def without_calibration(result: Result) -> str:
        configuration = {k: v for k, v in result["configuration"].items() if k != "calibration"}
        return fingerprint_of(configuration)

    seen: dict[str, set[str]] = {}
    for result in results:
        seen.setdefault(without_calibration(result), set()).add(_calibration(result))
    return [
        {**result, "configuration": {**c, "text": f"{c['text']} [{_calibration(result)}]"}}
        if len(seen[without_calibration(result)]) > 1
        else result
        for result in results
        for c in (result["configuration"],)
    ]


def _calibration(result: Result) -> str:
    """In few words: the tokens and the beginning of the text's hash."""
    sources = result["configuration"].get("calibration") or ["no text"]
    return "; ".join(re.sub(r", sha256 (\w{6})\w*", r", \1", source) for source in sources)


def _is_result(path: Path) -> bool:
    return re.search(r"@[^@]+-[0-9a-f]{12}\.json$", path.name) is not None


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=@-]+", "_", name).strip("_.") or "_"
