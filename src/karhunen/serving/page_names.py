"""Under which keys an engine's pages lie in a store.

    key of page i = H(key of page i − 1 ‖ its tokens),   key before the first = H(owner ‖ dtype ‖ salt)

The owner holds the model, every byte of its weights, the codec and the layout, so that models and revisions share a
store without meeting. What a tensor-parallel rank holds is named after its heads, and what a page has no place for (the
last tokens of sliding layers) lies beside the page that ends there.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from karhunen.pages import PageCodec, page_keys


@final
@dataclass(frozen=True)
class HeadShard:
    """Part `index` of `count` of each layer's KV heads; `writes` is false for a rank that holds a copy of another's."""

    index: int = 0
    count: int = 1
    writes: bool = True

    @classmethod
    def of_rank(cls, rank: int, n_ranks: int, n_kv_heads: int) -> "HeadShard":
        """As engines split heads: evenly, or each head on several ranks where there are fewer heads than ranks.

        ValueError if neither comes out even.
        """
        count = min(n_ranks, n_kv_heads)
        if n_kv_heads % count or n_ranks % count:
            raise ValueError(f"{n_kv_heads} KV heads are not split evenly over {n_ranks} ranks; use another number")
        copies = n_ranks // count
        return cls(rank // copies, count, rank % copies == 0)

    @property
    def suffix(self) -> str:
        """Of a key; nothing where a page holds all heads."""
        return "" if self.count == 1 else f"-{self.index}of{self.count}"

    @property
    def all_suffixes(self) -> list[str]:
        """Of all parts."""
        return [HeadShard(i, self.count).suffix for i in range(self.count)]


@final
@dataclass(frozen=True)
class PageNames:
    """Keys of the pages of texts, for one model, codec and page length."""

    owner: bytes
    page_tokens: int

    @classmethod
    def of(cls, pages: PageCodec, page_tokens: int) -> "PageNames":
        """All that a page depends on but its tokens and heads."""
        owner = pages.owner
        fields = (owner.model, owner.weights, owner.tokenizer, owner.codec, owner.layout, pages.dtype_name.encode())
        return cls(b"engine" + b"".join(fields), page_tokens)

    def keys(self, tokens: Sequence[int], salt: str = "", known: Sequence[str] = ()) -> list[str]:
        """Of the whole pages of a text, without the suffix of a shard."""
        return page_keys(self.owner + salt.encode(), tokens, self.page_tokens, known)

    def named(self, name: str) -> str:
        """The key of a page that the engine has named itself, by a hash of all tokens up to its end."""
        return hashlib.blake2b(self.owner + name.encode(), digest_size=16).hexdigest()


def window_key(key: str) -> str:
    """Of the last tokens of sliding layers at the end of a page."""
    return f"{key}-window"
