import sys

import pytest

from karhunen.monitoring import allocator


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is asked on Linux only")
def test_glibc_takes_the_advice() -> None:
    assert allocator.keep_freed_memory() is True


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert allocator.keep_freed_memory() is False
