"""The Python of docs/pages.md runs as it stands, on a tiny model in place of the embedded one."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import save_tiny

DOC = (Path(__file__).parents[2] / "docs" / "pages.md").read_text(encoding="utf-8")


def test_the_pages_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "llama", hidden_size=64, max_position_embeddings=4096)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for source in re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL):
        exec(compile(source.replace('"smollm2"', repr(str(folder))), "pages.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"n_restored=\d{3}", said)
    assert names["prefix"].store.counts.failures == 0
    assert list((tmp_path / "pages").glob("??/*.page"))
