"""Pages: coded tokens as self-describing bytes that can be stored, sent, cut between heads, and refused."""

from karhunen.pages.cut import cut_heads, cut_layers, join_heads, join_layers
from karhunen.pages.keys import page_keys
from karhunen.pages.page_codec import PageCodec

__all__ = ["PageCodec", "cut_heads", "cut_layers", "join_heads", "join_layers", "page_keys"]
