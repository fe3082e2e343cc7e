"""What is compiled and kept on disk: found again only while every source of the kernels is the same."""

import importlib
import pkgutil
from typing import Any

import pytest

from karhunen import kernels
from karhunen.kernels.scan import isa
from karhunen.kernels.scan.emit import Shape
from karhunen.kernels.sources import _say_once, kept_on_disk, sources  # pyright: ignore[reportPrivateUsage]


def compiled() -> dict[str, Any]:
    """Every function that Numba compiles, by its name."""
    dispatcher = pytest.importorskip("numba.core.registry").CPUDispatcher
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(kernels.__path__, "karhunen.kernels."):
        if info.name.rpartition(".")[2].startswith("cpu"):
            module = importlib.import_module(info.name)
            mine = vars(module).items()
            found |= {f"{f.__module__}.{name}": f for name, f in mine if isinstance(f, dispatcher)}
    return found


def test_what_is_kept_names_its_sources() -> None:
    kept = {name: f for name, f in compiled().items() if type(f._cache).__name__ != "NullCache"}
    assert len(kept) == 2
    for name, function in kept.items():
        closure = [cell.cell_contents for cell in function.py_func.__closure__ or ()]
        assert closure == [sources()], name


@pytest.mark.parametrize("name", ["scan_attention.cpu_loop", "exact_attention.cpu", "byte_encode.cpu"])
def test_what_threads_call_names_its_sources_too(name: str) -> None:
    module = pytest.importorskip(f"karhunen.kernels.{name}")
    token = Shape(1, isa.widths()[0]).token
    function = module._compiled(token, sources())
    assert type(function._cache).__name__ != "NullCache"
    closure = [cell.cell_contents for cell in function._pyfunc.__closure__ or ()]
    assert sorted(map(str, closure)) == sorted([str(token), sources()])


def test_other_sources_make_another_key() -> None:
    loop = pytest.importorskip("karhunen.kernels.byte_attention.cpu_loop")
    from numba import types
    from numba.core.codegen import JITCPUCodegen

    codegen, signature = JITCPUCodegen("test"), (types.int64,)
    mine, other, again = (loop._compiled(text)._cache._index_key(signature, codegen) for text in ("a", "b", "a"))
    assert mine == again != other


def test_where_nothing_can_be_written_kernels_are_compiled_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose installation and home are read-only."""
    numba, caching = pytest.importorskip("numba"), importlib.import_module("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(lambda x: x)
    _say_once.cache_clear()
    for _ in range(2):
        assert kept_on_disk(numba.njit)(lambda x: x + 1)(2) == 3
    assert [record.message.split(":")[0] for record in caplog.records] == ["compiled kernels cannot be kept"]


def test_another_error_of_the_compiler_is_not_taken_for_that() -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        kept_on_disk(broken)(len)
