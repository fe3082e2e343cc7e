"""Rows in a file."""

import errno
import tempfile
from pathlib import Path

import pytest
import torch

from karhunen.evaluation.scores.on_disk import on_disk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_as_they_were_and_no_file_is_left(dtype: torch.dtype, tmp_path: Path) -> None:
    parts = [torch.randn(n, 7, dtype=dtype) for n in (16, 16, 3)]
    held = on_disk(iter(parts), folder=str(tmp_path))
    assert held.dtype == dtype and torch.equal(held, torch.cat(parts))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: full)
        with pytest.raises(OSError) as raised:
            on_disk([torch.zeros(2000, 8)])
    assert raised.value.errno == errno.ENOSPC and "TMPDIR" in str(raised.value)


def test_parts_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 × torch\.float32 after parts of 3"):
        on_disk([torch.zeros(2, 3), torch.zeros(2, 4)])
