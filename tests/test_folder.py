"""Saving never removes what we did not write, and an artifact is there whole or not at all, whenever a writer dies."""

import os
import signal
import stat
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from random import Random

import pytest
from safetensors import SafetensorError
from tests.synthetic import codec

from karhunen import folder as folders
from karhunen.codec import Codec
from karhunen.folder import CONFIG, TENSORS, read_folder, remove_folder

OLD, NEW = codec("int4"), codec("spectra")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """What lies in a model's folder: a configuration named as ours is, and weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tensors.safetensors").write_bytes(b"weights of someone else, under our file's name")
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("precious")
    return folder


def test_a_models_folder_is_refused_and_left_alone(model_folder: Path) -> None:
    before = contents(model_folder)
    with pytest.raises(ValueError, match=r"holds config\.json, model\.safetensors, notes/ and 1 more, .* choose a new"):
        OLD.save_pretrained(model_folder)
    assert contents(model_folder) == before


@pytest.mark.parametrize("name", ["notes.txt", ".git", "model.safetensors", "statistics"])
def test_a_codecs_folder_that_holds_something_else_is_refused(name: str, tmp_path: Path) -> None:
    OLD.save_pretrained(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"holds {name}/, which no karhunen-codec consists of"):
        NEW.save_pretrained(tmp_path)
    assert contents(tmp_path) == before


def test_a_codec_does_not_replace_statistics(tmp_path: Path) -> None:
    folders.write_folder(tmp_path, "karhunen-statistics", 1, {}, {})
    with pytest.raises(ValueError, match=r"holds config\.json, tensors\.safetensors, which no karhunen-codec"):
        OLD.save_pretrained(tmp_path)
    assert read_folder(tmp_path, "karhunen-statistics", 1)[1] == {}


def test_an_artifact_inside_a_codecs_folder_stays_when_the_codec_is_replaced(tmp_path: Path) -> None:
    OLD.save_pretrained(tmp_path)
    folders.write_folder(tmp_path / "statistics", "karhunen-statistics", 1, {}, {})
    inside = contents(tmp_path / "statistics")
    NEW.save_pretrained(tmp_path)
    assert contents(tmp_path / "statistics") == inside
    assert Codec.from_pretrained(tmp_path).fingerprint() == NEW.fingerprint()


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    for made in (OLD, NEW):
        made.save_pretrained(link)
        assert link.is_symlink()
        assert Codec.from_pretrained(tmp_path / "real").fingerprint() == made.fingerprint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_the_working_folder_takes_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for made in (OLD, NEW):
        made.save_pretrained(".")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [CONFIG, "here", TENSORS]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_that_the_user_wants(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        OLD.save_pretrained(tmp_path / "codec")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "codec").iterdir()}
    assert modes == {CONFIG: 0o666 & ~umask, TENSORS: 0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "codec").stat().st_mode) == 0o777 & ~umask


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "codec", Path("/proc/nowhere/codec")):
        with pytest.raises(ValueError, match=r"is a file|cannot write into .*; choose another"):
            OLD.save_pretrained(target)
        with pytest.raises(ValueError, match="choose another"):
            folders.check_target(target, "karhunen-codec")
    folders.check_target(tmp_path / "new" / "deep", "karhunen-codec")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "asking leaves nothing behind"


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), OSError(28, "No space left on device")])
def test_a_full_disk_leaves_what_was_there(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OLD.save_pretrained(tmp_path / "old")
    before = contents(tmp_path)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(folders, "save_file", full)
    for name in ("old", "deep/new"):
        with pytest.raises(ValueError, match="No space left on device"):
            NEW.save_pretrained(tmp_path / name)
    assert contents(tmp_path) == before
    assert not (tmp_path / "deep").exists()


def fork() -> int:
    """A child that only writes files, so what Python warns of (locks of other threads) is not touched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def killed(work: Callable[[], None], at: str) -> None:
    """Do `work` in a process that dies before the configuration gets its name (`before`), or after it (`after`)."""
    child = fork()
    if child == 0:
        rename, named = Path.replace, list[str]()

        def replace(self: Path, target: Path) -> Path:
            if (target.name == CONFIG and at == "before") or (CONFIG in named and at == "after"):
                os._exit(7)
            named.append(target.name)
            return rename(self, target)

        Path.replace = replace  # type: ignore[method-assign]
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "it was to die"


def test_a_writer_may_be_killed_at_any_step(tmp_path: Path) -> None:
    """Two codecs in turn, killed at one step and then at another: what is read is the one that counts, whole."""
    folder = tmp_path / "codec"
    killed(lambda: OLD.save_pretrained(folder), at="before")
    with pytest.raises(ValueError, match="no artifact"):
        Codec.from_pretrained(folder)
    OLD.save_pretrained(folder)
    there = OLD
    for steps in product(("before", "after"), repeat=3):
        for step in steps:
            wanted = NEW if there is OLD else OLD
            killed(lambda wanted=wanted: wanted.save_pretrained(folder), at=step)
            there = there if step == "before" else wanted
            assert Codec.from_pretrained(folder).fingerprint() == there.fingerprint()
            assert {path.name for path in folder.iterdir()} <= {CONFIG, TENSORS, folders.NEW}
    NEW.save_pretrained(folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["codec", CONFIG, TENSORS], "nothing is left over"


def test_kills_at_any_time_leave_nothing_that_the_next_writer_does_not_clear(tmp_path: Path) -> None:
    folder, random = tmp_path / "codec", Random(0)
    OLD.save_pretrained(folder)
    for _ in range(25):
        child = fork()
        if child == 0:
            while True:
                NEW.save_pretrained(folder)
                OLD.save_pretrained(folder)
        time.sleep(random.uniform(0.01, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert Codec.from_pretrained(folder).fingerprint() in {OLD.fingerprint(), NEW.fingerprint()}
    NEW.save_pretrained(folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["codec", CONFIG, TENSORS]


def test_writers_and_readers_of_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    OLD.save_pretrained(tmp_path)
    read = set[str]()

    def write() -> None:
        for made in (NEW, OLD) * 8:
            made.save_pretrained(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            read.add(Codec.from_pretrained(tmp_path).fingerprint())
    assert [writer.result() for writer in writers] == [None, None], "neither failed"
    assert read <= {OLD.fingerprint(), NEW.fingerprint()}
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, TENSORS]


def test_removing_an_artifact_leaves_what_else_is_there(tmp_path: Path, model_folder: Path) -> None:
    OLD.save_pretrained(tmp_path / "alone")
    OLD.save_pretrained(tmp_path / "beside")
    (tmp_path / "beside" / "mine.txt").write_text("precious")
    before = contents(model_folder)
    for name in ("alone", "beside", "model"):
        remove_folder(tmp_path / name, "karhunen-codec")
    assert contents(model_folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "model"]
    assert [path.name for path in (tmp_path / "beside").iterdir()] == ["mine.txt"]
