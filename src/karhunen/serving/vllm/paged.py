"""One layer of the engine's paged cache: vectors out of blocks, and into them.

    block of one head = C·N numbers; which of them is coordinate d of token n's key, the attention backend decides

A backend may keep keys in another order than `[token, coordinate]` (the CPU backend keeps them transposed, in tiles),
so the order is never assumed. Vectors are written by the backend's own operation, and what that operation does to
numbered vectors tells where to read them.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.device import HOST

BASE = 64  # digits of a number that every dtype of a cache holds exactly

Order = tuple[Int[Tensor, "n d"], Int[Tensor, "n e"]]


@final
class PagedLayer:
    """A layer's view `[blocks, heads, block tokens, content]`; `attention` is the engine's layer object.

    `block_tokens` are those of the engine's block ids, which may count several of the view's blocks as one.
    """

    def __init__(self, attention: Any, view: Tensor, block_tokens: int, key_dim: int, value_dim: int) -> None:
        if view.ndim != 4 or block_tokens % view.shape[2] or view.shape[3] * view.shape[2] < key_dim + value_dim:
            raise ValueError(
                f"the engine keeps a layer as {tuple(view.shape)}; karhunen reads [blocks, heads, tokens, content] "
                f"with blocks that divide {block_tokens} tokens"
            )
        if not hasattr(attention.impl, "do_kv_cache_update"):
            raise ValueError(
                f"{type(attention.impl).__name__} does not write its cache by itself, so karhunen cannot write into "
                "it; choose another attention backend (--attention-backend)"
            )
        self.attention = attention
        self.view = view
        self.block_tokens = block_tokens
        self.key_dim, self.value_dim = key_dim, value_dim
        self._order: Order | None = None

    @property
    def n_heads(self) -> int:
        """KV heads held here."""
        return self.view.shape[1]

    def snapshot(self, blocks: Int[Tensor, " b"]) -> Float[Tensor, "k h n c"]:
        """A copy of blocks, in the backend's order, made before the engine's next operation."""
        return self.view[self._own_blocks(blocks)]

    def read(self, snapshot: Float[Tensor, "k h n c"]) -> tuple[Float[Tensor, "h t d"], Float[Tensor, "h t e"]]:
        """Keys and values of a snapshot."""
        flat = snapshot.flatten(2)
        found: list[Tensor] = []
        for order in self.order:
            taken = flat[:, :, order.flatten().to(flat.device)].unflatten(2, order.shape)
            found.append(taken.transpose(0, 1).flatten(1, 2))
        return found[0], found[1]

    def write(
        self, keys: Float[Tensor, "h t d"], values: Float[Tensor, "h t e"], first: int, blocks: Sequence[int]
    ) -> None:
        """Vectors of the tokens from `first` on; `blocks` is the request's table from its first token on."""
        tokens = torch.arange(first, first + keys.shape[1], device=HOST)
        table = torch.tensor(list(blocks), dtype=torch.int64, device=HOST)
        slots = table[tokens // self.block_tokens] * self.block_tokens + tokens % self.block_tokens
        self._update(keys, values, self.view, slots)

    @property
    def order(self) -> Order:
        """Where a block of one head, flattened, has its keys and values. ValueError where that is no order."""
        if self._order is None:
            self._order = self._find_order()
        return self._order

    def _own_blocks(self, blocks: Int[Tensor, " b"]) -> Int[Tensor, " k"]:
        split = self.block_tokens // self.view.shape[2]
        own = blocks[:, None] * split + torch.arange(split, device=HOST) if split > 1 else blocks
        return own.flatten().to(self.view.device)

    def _update(self, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        given = [x.transpose(0, 1).contiguous().to(cache.device) for x in (keys, values)]
        self.attention.impl.do_kv_cache_update(self.attention, given[0], given[1], cache, slots.to(cache.device))

    def _find_order(self) -> Order:
        n_tokens, content = self.view.shape[2:]
        numbers = torch.arange(1, n_tokens * (self.key_dim + self.value_dim) + 1, device=HOST)
        keys = numbers[: n_tokens * self.key_dim].view(n_tokens, self.key_dim)
        values = numbers[n_tokens * self.key_dim :].view(n_tokens, self.value_dim)
        # two blocks like the cache's own, the second is written: a backend may give the first a meaning
        cache = torch.empty_strided(
            (2, *self.view.shape[1:]), self.view.stride(), dtype=self.view.dtype, device=self.view.device
        )
        seen = torch.zeros(self.n_heads, n_tokens * content, dtype=torch.int64, device=HOST)
        place = 1
        while place <= len(numbers):
            cache.zero_()
            digits = [(x // place % BASE).to(self.view.dtype).expand(self.n_heads, *x.shape) for x in (keys, values)]
            self._update(digits[0], digits[1], cache, torch.arange(n_tokens, 2 * n_tokens, device=HOST))
            seen += cache[1].flatten(1).long().cpu() * place
            place *= BASE
        where = torch.full((len(numbers) + 1,), -1, device=HOST)
        if int(seen.max()) <= len(numbers) and int(seen.min()) >= 0 and bool((seen == seen[0]).all()):
            where[seen[0]] = torch.arange(seen.shape[1], device=HOST)
        if bool((where[1:] < 0).any()):
            raise ValueError(
                f"{type(self.attention.impl).__name__} does not keep vectors as they are (it rounds or mixes them), "
                "and karhunen codes vectors; use --kv-cache-dtype auto"
            )
        return where[keys], where[values]
