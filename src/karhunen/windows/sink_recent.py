"""The first tokens and the newest stay exact, what lies between is coded.

Source: attention sinks, StreamingLLM (arXiv:2309.17453); the recent window, KIVI (arXiv:2402.02750) and NOVA-KV.
Here:   tokens leave in pages, so between `recent` and `recent + page − 1` new tokens are exact at any time.
"""

import math
from dataclasses import dataclass
from typing import final

from karhunen.values import refuse_unless_whole
from karhunen.windows.base import Window
from karhunen.windows.partition import Partition, Place
from karhunen.windows.small_norm import SmallNorm


@final
@dataclass(frozen=True)
class SinkRecent(Window):
    """`sink` first and at least `recent` newest tokens exact; tokens are coded `page_tokens` at a time, and those that
    `keep` names stay exact as well."""

    sink: int = 4
    recent: int = 128
    page_tokens: int = 16
    keep: SmallNorm | None = None

    def __post_init__(self) -> None:
        refuse_unless_whole(sink=self.sink, recent=self.recent, page_tokens=self.page_tokens)
        if self.sink < 0 or self.recent < 0:
            raise ValueError(f"sink={self.sink} and recent={self.recent} count tokens; use 0 or more")
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens={self.page_tokens} is not a page; use 1 or more")

    @property
    def recent_tokens(self) -> int | None:
        """The recipe's option `recent`: newest tokens that stay exact."""
        return self.recent or None

    @property
    def sink_tokens(self) -> int:
        """The recipe's option `sink`: first tokens that stay exact."""
        return self.sink

    @property
    def exceptions(self) -> SmallNorm | None:
        """The rule `keep`, if there is one."""
        return self.keep

    def group_tokens(self, granule: int) -> int:
        """A page of whole granules."""
        return math.lcm(self.page_tokens, granule)

    def partition(self, n_tokens: int, granule: int) -> Partition:
        """Sinks, whole pages, the rest."""
        page = self.group_tokens(granule)
        sink = min(self.sink, n_tokens)
        coded = max(0, n_tokens - sink - self.recent) // page * page
        return Partition(
            (
                (Place.EXACT, 0, sink),
                (Place.CODED, sink, sink + coded),
                (Place.EXACT, sink + coded, n_tokens),
            )
        )
