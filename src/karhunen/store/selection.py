"""Which tokens of a layer a score has left: the decisions of a `TopScored` window, and what they are based on.

queries of a forward ─▶ scores of the tokens held ─▶ the best of those older than the recent ones, head by head
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from karhunen.windows.score import Queries
from karhunen.windows.top_scored import TopScored


@final
class Selection:
    """The state of one layer: where a score lasts, that of every token held, `[b h t]`; and how far was decided."""

    def __init__(self, window: TopScored) -> None:
        self.window = window
        self.scores: Tensor | None = None
        self.decided = False
        self.chosen_before = 0

    @property
    def reads_now(self) -> bool:
        """Whether the queries of the coming forward are needed."""
        return self.window.reads == "always" or (self.window.reads == "once" and not self.decided)

    def observe(self, queries: Queries, key: Float[Tensor, "b h t d"]) -> None:
        """The newest tokens' queries have read all tokens held."""
        now, before = self.window.score.scores(key, queries), self.scores
        self.scores = now if before is None else now + pad(before, (0, key.shape[2] - before.shape[2]))

    def choose(self, key: Float[Tensor, "b h n d"], n_sink: int, n_seen: int) -> Int[Tensor, "b h kept"] | None:
        """Who stays of the exact tokens after the sinks, in order; None where all do.

        ValueError if the score looks at queries and did not see those of every token.
        """
        n, again = key.shape[2], self.window.again
        if self.decided and not again:
            return None
        n_shown = 0 if self.scores is None else self.scores.shape[2]
        if self.window.reads != "never" and n_shown != n_sink + n:
            raise ValueError(
                f"{type(self.window.score).__name__} chooses tokens by what queries attend to, but the queries of "
                f"{n_sink + n - n_shown} tokens were not shown; hand them over together with keys and values"
            )
        self.decided, left = True, None
        if n_dropped := self.window.n_dropped_of(n, n_seen):
            n_recent = self.window.recent.of(n_seen)
            n_best = max(0, self.window.kept.of(n_seen) - n_recent)
            n_old = n_best + n_dropped
            best = self._ranked(key[:, :, :n_old], n_sink)[..., :n_best].sort(-1).values
            newest = torch.arange(n_old, n, device=key.device).expand(*key.shape[:2], -1)
            left = torch.cat([best, newest], dim=-1)
            self.chosen_before = n_seen - (n - n_old)
        if not again:
            self.scores = None
        elif self.scores is not None and left is not None:
            after = self.scores[..., n_sink:].gather(-1, left)
            self.scores = torch.cat([self.scores[..., :n_sink], after], dim=-1)
        return left

    def check_crop(self, n_tokens: int, n_dropped: int) -> None:
        """ValueError where what was decided, or summed up, would have to be taken back."""
        if self.scores is not None:
            raise ValueError(
                f"{type(self.window.score).__name__} has summed up what the newest tokens attend to, which cannot be "
                f"taken back: the cache cannot end at token {n_tokens}; start again, or decide once"
            )
        if n_dropped and n_tokens < self.chosen_before:
            raise ValueError(
                f"{n_dropped} of the first {self.chosen_before} tokens were dropped, so the cache cannot end at token "
                f"{n_tokens}; keep {self.chosen_before} or more, or start again"
            )

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the given rows of the batch, in that order; rows may repeat."""
        if self.scores is not None:
            self.scores = self.scores.index_select(0, rows.to(self.scores.device))

    def _ranked(self, old: Float[Tensor, "b h n d"], n_sink: int) -> Int[Tensor, "b h n"]:
        """Highest score first; of equal ones the older."""
        if self.scores is None:
            scores = self.window.score.scores(old, None)
        else:
            scores = self.scores[..., n_sink : n_sink + old.shape[2]]
        return scores.argsort(dim=-1, descending=True, stable=True)
