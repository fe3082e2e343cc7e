"""What the queries that have read a layer's exact tokens paid to each: the sum of their squared weights, and how many.

    s_n = Σ_m mean over heads a_mn² / number of queries m        queries: the newest `n_queries` of each forward

Kept while a token is exact, and forgotten when it leaves.
"""

from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from karhunen.kernels.softmax import capped
from karhunen.windows.attention_weights import weight_blocks
from karhunen.windows.score import Queries

MOST_WEIGHTS = 1 << 24  # that exist at a time: a long prompt has as many for each query as it has tokens


@final
class Observed:
    """Of the `n` exact tokens after the sinks: `sums` `[b n]` and `counts` `[n]`."""

    def __init__(self, n_queries: int) -> None:
        self.n_queries = n_queries
        self.sums: Tensor | None = None
        self.counts: Tensor | None = None

    def extend(self, b: int, n: int, device: torch.device) -> None:
        """So many exact tokens more."""
        new, none = torch.zeros(b, n, device=device), torch.zeros(n, dtype=torch.int32, device=device)
        self.sums = new if self.sums is None else torch.cat([self.sums, new], dim=1)
        self.counts = none if self.counts is None else torch.cat([self.counts, none])

    def see_all(
        self, queries: Queries, key: Float[Tensor, "b h t d"], unseen: Bool[Tensor, "b t"] | None = None
    ) -> None:
        """The newest tokens' queries have read `key`, all tokens held but the `unseen` (padding)."""
        n, n_rows = self._n, min(self.n_queries, queries.rows.shape[2])
        block = max(1, min(n_rows, MOST_WEIGHTS // (queries.rows.shape[:2].numel() * key.shape[2])))
        weights = weight_blocks(queries, key, n_rows, unseen, block)
        paid = sum(w[..., -n:].square().sum(3).flatten(1, 2).mean(1) for w in weights)
        assert isinstance(paid, Tensor), "a forward has at least one query"
        self._add(paid if n else paid[:, :0], n_rows)

    def see_exact(
        self,
        queries: Queries,
        key: Float[Tensor, "b h n d"],
        log_sum: Float[Tensor, "b q m"],
        mask: Tensor | None = None,
    ) -> None:
        """The newest tokens' queries have read all tokens held, of which `key` are the exact ones after the sinks;
        `log_sum` is the logarithm of what their softmax was divided by, `mask` `[b 1 m n]` over these tokens."""
        n, m = key.shape[2], queries.rows.shape[2]
        n_rows = min(self.n_queries, m)
        rows = queries.rows[:, :, m - n_rows :].float().unflatten(1, (key.shape[1], -1))
        scores = capped((rows @ key.float()[:, :, None].mT * queries.scale).flatten(1, 2), queries.softcap)  # [b q m n]
        if mask is None:
            if n_rows > 1:  # one row is the newest token, which sees all
                seen = torch.ones(n_rows, n, dtype=torch.bool, device=key.device).tril(n - n_rows)
                scores = scores.masked_fill(~seen, -torch.inf)
        else:
            here = mask[:, :, m - n_rows :]
            scores = scores.masked_fill(~here, -torch.inf) if here.dtype == torch.bool else scores + here
        weights = (scores - log_sum[:, :, m - n_rows :, None].float()).exp()
        paid = weights.square().flatten(1, 2).mean(1) if n_rows == 1 else weights.square().sum(2).mean(1)
        self._add(paid, n_rows)

    def _add(self, paid: Float[Tensor, "b n"], n_rows: int) -> None:
        assert self.sums is not None and self.counts is not None, "a token is held before it is read"
        n = min(paid.shape[1], self._n)  # a layer that others share is read again when tokens have left
        if n == 0:
            return
        self.sums[:, -n:] += paid[:, -n:]
        if n_rows == 1:
            self.counts[-n:] += 1
            return
        age = torch.arange(n - 1, -1, -1, device=self.counts.device)
        self.counts[-n:] += (age + 1).clamp_max(n_rows).int()

    def mean(self, n: int) -> Float[Tensor, "b n"]:
        """Mean squared weights of the first `n`, 0 where nobody has looked; ValueError if nobody looked at any."""
        assert self.sums is not None and self.counts is not None, "a token is held before it leaves"
        if n and not bool(self.counts[:n].any()):
            raise ValueError(
                f"{n} tokens are coded by what queries attend to, but no queries were shown; hand them over together "
                "with keys and values"
            )
        return self.sums[:, :n] / self.counts[:n].clamp_min(1)

    def forget(self, n: int) -> None:
        """The first `n` have left."""
        assert self.sums is not None and self.counts is not None, "a token is held before it leaves"
        self.sums, self.counts = self.sums[:, n:].clone(), self.counts[n:].clone()

    def keep(self, n: int, n_new: int = 0) -> None:
        """`n_new` tokens come back that were not looked at, and of these and all others the first `n` stay."""
        if self.sums is None or self.counts is None:
            return
        b = self.sums.shape[0]
        self.sums = torch.cat([self.sums.new_zeros(b, n_new), self.sums], dim=1)[:, :n].clone()
        self.counts = torch.cat([self.counts.new_zeros(n_new), self.counts])[:n].clone()

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in that order; rows may repeat."""
        if self.sums is not None:
            self.sums = self.sums.index_select(0, rows.to(self.sums.device))

    def tensors(self) -> dict[str, Tensor]:
        """All that takes memory, named by kind."""
        return {} if self.sums is None or self.counts is None else {
            "side.observed.sums": self.sums, "side.observed.counts": self.counts,
        }  # fmt: skip

    @property
    def _n(self) -> int:
        return 0 if self.sums is None else self.sums.shape[1]
