"""What every test shares: types and shapes checked at run time, a number of threads, fast tests first, poisoned memory.

The hook must stand before anything imports karhunen. Modules that compile their functions (Numba, Triton) are left
out: a compiler cannot look through a checking wrapper. Their naive twins, of the same signatures, are checked.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
import torch

SOURCE = Path(__file__).parent.parent / "src" / "karhunen"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which settles how its kernels run


def _module_name(file: Path) -> str:
    parts = ("karhunen", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _compiled_modules() -> frozenset[str]:
    compiler = re.compile(r"^\s*(?:import|from)\s+(?:numba|triton)\b", re.MULTILINE)
    return frozenset(
        _module_name(file) for file in SOURCE.rglob("*.py") if compiler.search(file.read_text(encoding="utf-8"))
    )


class CompiledModules(MetaPathFinder):
    """Finds the compiled modules before the checking hook does, and hands them on unchanged."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, path, target) if fullname in self.names else None


# an int will do where a float is asked for, as in the typing rules (PEP 484)
jaxtyping.install_import_hook("karhunen", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
sys.meta_path.insert(0, CompiledModules(_compiled_modules()))
import_module("karhunen.monitoring.allocator").keep_freed_memory()
torch.set_num_threads(1)  # for what is built at import


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="threads of every test that does not ask for its own")


@pytest.fixture(autouse=True)
def n_threads_of_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """One unless asked for: the suite runs in two processes, and on tiny models threads cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("--threads"))
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first, then `slow`, then those that need a model; the order is otherwise kept. Those marked `long` are
    left out, unless the marks asked for (`-m long`) name them."""
    if "long" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items.sort(key=lambda item: 2 if item.get_closest_marker("model") else bool(item.get_closest_marker("slow")))


@torch.no_grad()
def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill fresh memory with what no right answer holds: NaN, or the largest value an integer type has."""
    if tensor.is_floating_point() or tensor.is_complex():
        try:
            return tensor.fill_(float("nan"))
        except (NotImplementedError, RuntimeError):  # float8 kinds have no fill: 0x7F is NaN or large in each
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_and_poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _poison(allocate(*args, **kwargs))

    return allocate_and_poison


@pytest.fixture
def nan_filled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that Python code allocates without a value is poisoned, so a kernel that reads it is found out.

    Reaches `torch.empty` and its kin and NumPy's `empty`, under the names called from Python; not what a C++ op or
    compiled code allocates inside itself.
    """
    import numpy as np

    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))

    def poisoned_array(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_and_poison(*args: Any, **kwargs: Any) -> Any:
            array = allocate(*args, **kwargs)
            if array.dtype.kind in "fc":
                array.fill(np.nan)
            elif array.dtype.kind in "iu":
                array.fill(np.iinfo(array.dtype).max)
            return array

        return allocate_and_poison

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, poisoned_array(getattr(np, name)))
