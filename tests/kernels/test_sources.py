"""What is compiled and kept on disk: found again only while every source of the kernels is the same."""

import importlib
import pkgutil
from typing import Any

import pytest

from karhunen import kernels
from karhunen.kernels.scan import isa
from karhunen.kernels.scan.emit import Shape
from karhunen.kernels.sources import sources


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
