"""How the engine keeps the layers of a codec: which block table is whose, and how many tokens a block has.

    group 0: [block of tokens 0 … b) [block of tokens b … 2b) …      one table of block ids for all layers of a group

Layers that keep all tokens go into pages. Of layers with a window the last tokens are kept beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final


@final
@dataclass(frozen=True)
class Group:
    """Layers that share a block table; `window` is None where they keep all tokens."""

    layers: tuple[int, ...]
    block_tokens: int
    window: int | None = None


@final
@dataclass(frozen=True)
class EngineLayout:
    """All groups, in the engine's order, and the tokens of a page."""

    groups: tuple[Group, ...]
    page_tokens: int

    @cached_property
    def is_windowed(self) -> bool:
        """Whether pages alone do not restore a prefix."""
        return any(group.window is not None for group in self.groups)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """By layer."""
        return {layer: i for i, group in enumerate(self.groups) for layer in group.layers}

    def blocks_of_pages(self, blocks: Sequence[Sequence[int]], pages: slice) -> tuple[tuple[int, ...], ...]:
        """Of the groups that keep all tokens, those of a run of pages."""
        found: list[tuple[int, ...]] = []
        for group, ids in zip(self.groups, blocks, strict=True):
            per_page = self.page_tokens // group.block_tokens
            whole = group.window is None
            found.append(tuple(ids[pages.start * per_page : pages.stop * per_page]) if whole else ())
        return tuple(found)

    def window_tokens(self, group: Group, n_tokens: int) -> range:
        """Which tokens a layer with a window still needs after `n_tokens`, from the start of a block on."""
        assert group.window is not None, "layers without a window keep all their tokens"
        first = max(0, n_tokens - group.window + 1)
        return range(first, n_tokens)
