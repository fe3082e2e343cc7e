"""Names of pages by the tokens they stand for: each page's key hashes the key before it and the page's own tokens.

    k_0 = H(owner),   k_{i+1} = H(k_i ‖ tokens of page i)

Two texts share exactly the pages of their common beginning. Source: the prefix hashes of vLLM's block pool.
Here:   the owner (model, weights, tokenizer, codec, layout, dtype, heads) and the page length are in k_0, so one store
        serves many models and codecs, and a key never names another one's page.
"""

import hashlib
import struct
from collections.abc import Sequence

KEY_BYTES = 16


def page_keys(owner: bytes, tokens: Sequence[int], page_tokens: int, known: Sequence[str] = ()) -> list[str]:
    """A key of 32 hex digits for each whole page of `tokens`. `known`: those of its first pages, not made again."""
    if page_tokens < 1:
        raise ValueError(f"page_tokens={page_tokens} is not a page; use 1 or more")
    key = bytes.fromhex(known[-1]) if known else _hash(owner + struct.pack("<Q", page_tokens))
    keys = list(known)
    for start in range(len(known) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        page = tokens[start : start + page_tokens]
        key = _hash(key + struct.pack(f"<{page_tokens}q", *page))
        keys.append(key.hex())
    return keys


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
