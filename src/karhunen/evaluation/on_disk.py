"""Rows that are read seldom and are too many to hold: a tensor in a temporary file, which the system may page out."""

import os
import tempfile
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def on_disk(parts: Iterable[Float[Tensor, "t v"]], folder: str | None = None) -> Float[Tensor, "m v"]:
    """All parts, row after row, in a file that no name leads to and that is gone with the tensor.

    In memory where the system cannot delete a file that is in use. OSError if there is no room in `folder`, by default
    that of temporary files.
    """
    if os.name != "posix":
        return torch.cat(list(parts))
    with tempfile.NamedTemporaryFile(prefix="karhunen-", dir=folder) as file:
        n_rows, width, dtype = 0, 0, torch.float32
        for part in parts:
            width, dtype = part.shape[1], part.dtype
            file.write(part.contiguous().cpu().view(torch.uint8).numpy().data)
            n_rows += len(part)
        file.flush()
        return torch.from_file(file.name, shared=True, size=n_rows * width, dtype=dtype).view(n_rows, width)
