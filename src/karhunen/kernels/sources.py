"""What compiled kernels were made from: they are kept on disk under a key that holds it.

Numba keeps a compiled function for as long as that function's own file is unchanged, whatever became of those it calls.
So only the outermost function of a kernel is kept, and it names this text of all sources of `karhunen.kernels`: its key
has it too, since a function's free variables are part of the key.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)


@cache
def sources() -> str:
    """A digest of every file of `karhunen.kernels`."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def kept_on_disk(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """`compiler(*arguments, **options)` of Numba as a decorator whose result is kept on disk; where no folder can be
    written (a read-only installation and a read-only home) it is compiled in every process, which is said once."""

    def decorate(function: Any) -> Any:
        try:
            return compiler(*arguments, cache=True, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            _say_once()
            return compiler(*arguments, **options)(function)

    return decorate


@cache
def _say_once() -> None:
    _LOG.warning(
        "compiled kernels cannot be kept: neither karhunen's folder nor the user's cache folder can be written, so "
        "every process compiles them anew; set NUMBA_CACHE_DIR to a folder that can be"
    )
