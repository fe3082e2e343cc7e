"""A decode step over 32 thousand coded tokens makes no dense copy: what it allocates does not grow with the cache."""

import tracemalloc
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.hf.test_cache import WINDOW, codec_of, run, tokens
from tests.hf.tiny import build
from tests.synthetic import seeded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from karhunen.hf.attention import NAME
from karhunen.hf.cache import CompressedCache

N_TOKENS = 32768
SHAPE: dict[str, Any] = {  # SmolLM2's attention; the rest is small
    "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 40000,
}  # fmt: skip
BLOCK_BYTES = 4 << 20
"""Working memory of one chunk (8,192 tokens), two layers' activations and a page of new tokens."""


class Allocations(TorchDispatchMode):
    """The most bytes alive at one time among tensors made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if self._real(x)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if self._real(x) and x.untyped_storage()._cdata not in before | self.seen:
                self._count(x.untyped_storage())
        return out

    def _real(self, x: Any) -> bool:
        return type(x) in (torch.Tensor, torch.nn.Parameter)

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self.seen.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def filled(model: Any, n: int) -> CompressedCache:
    """As after a prefill of `n` random tokens."""
    held = CompressedCache(model, codec_of(model, "karhunen"))
    for layer in held.layers:
        layer.update(*(torch.randn(1, 3, n, 64, generator=seeded(i)) for i in range(2)))
    return held


def peak_of_step(model: Any, held: CompressedCache) -> int:
    """Bytes allocated at the peak of one step, by torch and by NumPy."""
    allocations = Allocations()
    tracemalloc.start()
    with torch.no_grad(), allocations:
        run(model, tokens(1, 1), held)
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return allocations.peak + python_peak


@pytest.mark.slow
def test_a_step_allocates_no_dense_copy() -> None:
    model = build("llama", **SHAPE)
    held = filled(model, N_TOKENS)
    dense = held.report().total.dense // len(held.layers)
    decoded = peak_of_step(model, deepcopy(held))
    assert decoded > dense  # the measure sees a dense copy of one layer
    model.set_attn_implementation(NAME)
    account = held.report().layers[0].account
    packed, exact = account.codes + account.side, account.exact
    for _ in range(WINDOW.page_tokens):
        run(model, tokens(1, 1), held)  # kernels are loaded, a page has been coded
    fused = max(peak_of_step(model, held) for _ in range(2 * WINDOW.page_tokens))
    assert fused < packed + exact + BLOCK_BYTES
    assert fused < dense // 4
