"""Pages: coded tokens as self-describing bytes that can be stored, sent, cut between heads, and refused."""

from karhunen.pages.cut import cut_heads, cut_layers, join_heads, join_layers
from karhunen.pages.keys import page_keys
from karhunen.pages.page_codec import PageCodec
from karhunen.pages.refined_pages import RefinedPages, base_codec, refinement_key

__all__ = [
    "PageCodec",
    "RefinedPages",
    "base_codec",
    "cut_heads",
    "cut_layers",
    "join_heads",
    "join_layers",
    "page_keys",
    "refinement_key",
]
