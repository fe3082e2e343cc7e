"""What compiled kernels were made from: they are kept on disk under a key that holds it.

Numba keeps a compiled function for as long as that function's own file is unchanged, whatever became of those it calls.
So only the outermost function of a kernel is kept, and it names this text of all sources of `karhunen.kernels`: its key
has it too, since a function's free variables are part of the key.
"""

import hashlib
from functools import cache
from pathlib import Path


@cache
def sources() -> str:
    """A digest of every file of `karhunen.kernels`."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
