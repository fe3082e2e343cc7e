"""Fingerprints of what a cache depends on: all weights below the head, and the tokenizer.

    a weight [rows columns] of 32-bit numbers  ─▶  Σ over rows, Σ over columns, as integers modulo 2⁶⁴  ─▶  BLAKE2

Sums of integers are the same on every device and in every order, read each number once, and change with any one of
them. `statistics.identity` has a cheaper hash, of a sample; it tells models apart, not two stages of one training.
"""

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

COLUMNS = 1024
BLOCK = COLUMNS << 12  # numbers turned to float32 at a time

_KNOWN: "WeakKeyDictionary[nn.Module, tuple[object, str]]" = WeakKeyDictionary()


def weights_fingerprint(model: nn.Module) -> str:
    """32 hex digits of every weight and buffer below the model's head.

    Independent of the device, and of the dtype they were loaded in as long as that changed no value. Remembered until a
    weight is written to.
    """
    body: Any = getattr(model, "base_model", model)
    tensors = [*body.named_parameters(), *body.named_buffers()]
    state = tuple((tensor.data_ptr(), tensor._version) for _, tensor in tensors)  # pyright: ignore[reportPrivateUsage]
    if (known := _KNOWN.get(model)) is not None and known[0] == state:
        return known[1]
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(_sums(tensor.detach()))
    _KNOWN[model] = state, digest.hexdigest()
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """32 hex digits of how text becomes tokens; empty where the tokenizer does not say."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    text = inner.to_str() if inner is not None and hasattr(inner, "to_str") else ""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def _sums(tensor: Tensor) -> bytes:
    if tensor.is_meta:
        raise ValueError("weights that are not loaded have no fingerprint; load the model first")
    flat = tensor.reshape(-1)
    columns = torch.zeros(COLUMNS, dtype=torch.int64, device=tensor.device)
    rows = hashlib.blake2b(digest_size=16)
    for start in range(0, flat.numel(), BLOCK):
        numbers = _integers(flat[start : start + BLOCK])
        whole = numbers[: numbers.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
        columns += whole.sum(0, dtype=torch.int64)
        rows.update(whole.sum(1, dtype=torch.int64).cpu().numpy().tobytes())
        rest = numbers[whole.numel() :]
        rows.update(rest.to(torch.int64).cpu().numpy().tobytes())
    return columns.cpu().numpy().tobytes() + rows.digest()


def _integers(x: Tensor) -> Tensor:
    """Floating point numbers as float32 bits, others as they are."""
    if x.dtype == torch.float64:
        return x.contiguous().view(torch.int64)
    if x.dtype.is_floating_point:
        return x.float().contiguous().view(torch.int32)
    return x.to(torch.int64)
