"""The first tokens and the newest stay, what lies between is dropped; the older of those that stay may be coded.

    0 ···· sink ··············· n − recent − coded ·········· n − recent ·········· n
    [ exact ][ dropped: no bytes ][ coded                    ][ exact                ]

Source: StreamingLLM (arXiv:2309.17453): attention sinks and a recent window (`coded = 0`). With `coded > 0` eviction
and quantization are one window: a token is exact, then coded, then gone.
Here:   tokens keep the positions they had (StreamingLLM counts positions within its cache), and move in pages.
"""

import math
from dataclasses import dataclass
from typing import final

from karhunen.values import refuse_unless_whole
from karhunen.windows.base import Window
from karhunen.windows.partition import Partition, Place


@final
@dataclass(frozen=True)
class Streaming(Window):
    """`sink` first and at least `recent` newest tokens exact, up to `coded` before those coded, the others dropped."""

    sink: int = 4
    recent: int = 1020
    coded: int = 0
    page_tokens: int = 16

    def __post_init__(self) -> None:
        refuse_unless_whole(sink=self.sink, recent=self.recent, coded=self.coded, page_tokens=self.page_tokens)
        if min(self.sink, self.recent, self.coded) < 0:
            raise ValueError(f"sink={self.sink}, recent={self.recent}, coded={self.coded} count tokens; use 0 or more")
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
    def drops(self) -> bool:
        """Always, once there are enough tokens."""
        return True

    def partition(self, n_tokens: int, granule: int) -> Partition:
        """Sinks, dropped pages, coded pages, the rest."""
        page = math.lcm(self.page_tokens, granule)
        sink = min(self.sink, n_tokens)
        left = max(0, n_tokens - sink - self.recent) // page * page
        coded = min(left, self.coded // page * page)
        edges = (0, sink, sink + left - coded, sink + left, n_tokens)
        places = (Place.EXACT, Place.DROPPED, Place.CODED, Place.EXACT)
        return Partition(tuple(zip(places, edges[:-1], edges[1:], strict=True)))
