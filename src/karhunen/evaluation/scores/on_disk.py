"""Rows that are read seldom and are too many to hold: a tensor in a temporary file, which the system may page out."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor


def on_disk(parts: Iterable[Float[Tensor, "t v"]], folder: str | None = None) -> Float[Tensor, "m v"]:
    """All parts, row after row, in a file that no name leads to and that is gone with the tensor.

    In memory where the system cannot delete a file that is in use. OSError if there is no room in `folder`, by default
    that of temporary files; ValueError on parts of different width or dtype.
    """
    if os.name != "posix":
        return torch.cat(list(parts))
    with tempfile.NamedTemporaryFile(prefix="karhunen-", dir=folder) as file:
        n_rows, kind = 0, (0, torch.float32)
        for part in parts:
            if n_rows and kind != (part.shape[1], part.dtype):
                raise ValueError(f"a part of {part.shape[1]} × {part.dtype} after parts of {kind[0]} × {kind[1]}")
            kind = (part.shape[1], part.dtype)
            try:
                file.write(part.contiguous().cpu().view(torch.uint8).numpy().data)
                file.flush()
            except OSError as error:
                where = Path(file.name).parent
                said = f"{error.strerror} in {where}; set TMPDIR to a folder with more room"
                raise OSError(error.errno, said) from error
            n_rows += len(part)
        width, dtype = kind
        return torch.from_file(file.name, shared=True, size=n_rows * width, dtype=dtype).view(n_rows, width)
