"""The tokens of highest score stay, head by head; the others are dropped.

    seen     0 ·· sink ·················································· n − recent ········ n
             [ kept ][ the best by score stay, at their own positions   ][ kept               ]

`kept` tokens stay besides the sinks, the `recent` newest among them. Decided once, when the first forward (the prompt)
has been attended to; or `again` whenever `page_tokens` more have come, among those that were left. What stays is exact,
or `coded` as it leaves the recent window: eviction and quantization are one window.

Source: SnapKV (arXiv:2404.14469) decides once, H2O (arXiv:2306.14048) again; the score says by what.
Here:   heads keep equally many tokens, so what is held stays one tensor; who they are is not stored, reading needs no
        index. A prompt that comes in chunks is decided on after its first chunk, unless it is decided again.
"""

import math
from dataclasses import dataclass
from typing import final

from karhunen.values import refuse_unless_whole
from karhunen.windows.base import Window
from karhunen.windows.budget import Budget, Tokens
from karhunen.windows.key_norm import KeyNorm
from karhunen.windows.partition import Partition, Place
from karhunen.windows.score import Reads, Score


@final
@dataclass(frozen=True)
class TopScored(Window):
    """`sink` first tokens and `kept` more per head, of which the `recent` newest are not chosen by score."""

    score: Score = KeyNorm()
    kept: Budget = Tokens(1024)
    recent: Budget = Tokens(32)
    sink: int = 0
    again: bool = False
    coded: bool = False
    page_tokens: int = 16

    def __post_init__(self) -> None:
        refuse_unless_whole(sink=self.sink, page_tokens=self.page_tokens)
        if self.sink < 0 or self.page_tokens < 1:
            raise ValueError(f"sink={self.sink}, page_tokens={self.page_tokens}: use 0 or more, and 1 or more")
        if isinstance(self.kept, Tokens) and isinstance(self.recent, Tokens) and self.kept.n < self.recent.n:
            raise ValueError(
                f"kept={self.kept.n} tokens are to hold the recent={self.recent.n} newest; use kept={self.recent.n} or "
                "more, or a smaller recent"
            )
        kind, newest = type(self.score).__name__, self.score.newest
        if newest and not (isinstance(self.recent, Tokens) and self.recent.n >= newest):
            raise ValueError(f"{kind} gives the {newest} newest tokens no score; keep recent=Tokens({newest}) or more")
        if self.again and self.score.reads == "once":
            raise ValueError(f"{kind} looks at the prompt's queries and decides once; leave `again` out")
        if self.again and self.coded:
            raise ValueError("a token that is coded is not chosen again, head by head; use one of `again` and `coded`")

    @property
    def sink_tokens(self) -> int:
        """The recipe's option `sink`: first tokens that stay exact."""
        return self.sink

    @property
    def drops(self) -> bool:
        """Always, once there are enough tokens."""
        return True

    @property
    def reads(self) -> Reads:
        """What the score asks for, and not after the only decision."""
        return "once" if self.score.reads == "always" and not self.again else self.score.reads

    def n_dropped_of(self, n_held: int, n_seen: int) -> int:
        """How many of `n_held` tokens after the sinks go now, `n_seen` having come in all; whole pages if again."""
        excess = n_held - max(self.kept.of(n_seen), self.recent.of(n_seen))
        page = self.page_tokens if self.again else 1
        return max(0, excess) // page * page

    def partition(self, n_tokens: int, granule: int) -> Partition:
        """Of the tokens that the score has left: sinks, coded pages, the rest."""
        page = math.lcm(self.page_tokens, granule)
        sink = min(self.sink, n_tokens)
        leaving = max(0, n_tokens - sink - self.recent.of(n_tokens)) if self.coded else 0
        edge = sink + leaving // page * page
        return Partition(((Place.EXACT, 0, sink), (Place.CODED, sink, edge), (Place.EXACT, edge, n_tokens)))
