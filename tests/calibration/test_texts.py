from pathlib import Path

import pytest

from karhunen.calibration.texts import calibration_text, evaluation_text, read_texts


def test_the_default_texts_are_long_and_share_no_paragraph() -> None:
    one, other = calibration_text(), evaluation_text()
    assert min(len(one), len(other)) > 150_000
    assert not set(one.split("\n\n")) & set(other.split("\n\n")) - {""}


def test_the_default_texts_are_the_same_at_every_call() -> None:
    assert calibration_text() == calibration_text()


def test_folders_are_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.md", "a.txt", "sub/c.py", "picture.png"):
        (tmp_path / name).write_text(name)
    assert read_texts([tmp_path]) == ["a.txt", "b.md", "sub/c.py"]
    assert read_texts([tmp_path / "picture.png"]) == ["picture.png"]


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"binary.txt is not UTF-8"):
        read_texts([tmp_path / "binary.txt"])
    with pytest.raises(ValueError, match=r"text is empty: .*blank.txt"):
        read_texts([tmp_path / "blank.txt"])
    with pytest.raises(ValueError, match="holds no text files"):
        read_texts([tmp_path / "empty"])
    with pytest.raises(ValueError, match="no such file"):
        read_texts([tmp_path / "absent.txt"])
