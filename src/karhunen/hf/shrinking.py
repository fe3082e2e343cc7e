"""Memory asked back from a progressive cache while it is in use: refinements go, coldest first, and the base stays.

    line ↑   heat − line < 16 · layer  ⇒  that layer's bytes of the token are cut off

All layers of the model give back to one line, so the same thing is lost everywhere; nothing is coded again.
"""

import logging
from typing import TYPE_CHECKING

from karhunen.codec import Codec
from karhunen.store.refinements import hottest_line
from karhunen.values import refuse_unless_whole
from karhunen.windows.refining import Refining

if TYPE_CHECKING:
    from karhunen.hf.cache import CompressedCache

_LOG = logging.getLogger(__name__)


def check_max_bytes(codec: Codec, max_bytes: int) -> None:
    """ValueError unless caches of this codec can keep within a number of bytes."""
    refuse_unless_whole(max_bytes=max_bytes)
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} is no size; use 1 or more")
    if not isinstance(codec.window, Refining):
        raise ValueError(
            f"max_bytes={max_bytes} needs tokens that have something to give back, and those of recipe "
            f"{codec.origin.recipe or 'this codec'} have one rate; use karhunen:progressive=true"
        )


def shrink(cache: "CompressedCache", n_bytes: int) -> int:
    """Give back `n_bytes` or a little more (`CompressedCache.shrink`)."""
    refuse_unless_whole(n_bytes=n_bytes)
    stores = [layer.store for layer in cache.coded_layers() if layer.store.refinements is not None]
    if not stores:
        raise ValueError(
            f"nothing here has refinements to give back: tokens of recipe {cache.codec.origin.recipe or 'this codec'} "
            "have one rate; use karhunen:progressive=true"
        )
    refined = [store.refinements for store in stores if store.refinements is not None]
    if any(each.is_shared for each in refined):
        raise ValueError("this cache shares its bytes with the one it branched from; shrink that before it branches")
    if n_bytes <= 0:
        return 0
    before = sum(store.account().held for store in stores)
    line, n_stores = hottest_line(refined, n_bytes)
    for i, store in enumerate(stores):
        store.raise_line(line if i < n_stores else line - 1)
    return before - sum(store.account().held for store in stores)


def keep_within(cache: "CompressedCache") -> None:
    """Shrink a cache that holds more than its `max_bytes`; says so once where its base alone is more."""
    if cache.max_bytes is None:
        return
    excess = cache.report().total.held - cache.max_bytes
    if excess > 0 and shrink(cache, excess) < excess and not cache.is_over:
        _LOG.warning(
            "all tokens are at their base and the cache holds %d bytes more than max_bytes=%d; it goes on growing",
            cache.report().total.held - cache.max_bytes, cache.max_bytes,
        )  # fmt: skip
        cache.is_over = True
