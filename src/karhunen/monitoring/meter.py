"""What a cache does while it runs: tokens coded, seconds that took, and how far attention's outputs move by it.

    tokens leave the exact window ─▶ counted, timed
      on sampled layers, now and then ─▶ exact and decoded, asked by the queries of the last steps ─▶ δ

δ is `attention_accuracy_delta` over the newest tokens that leave together: their exact vectors are at hand for the last
time. Queries are seen where attention reads bytes; before that, and with another attention, the exact keys after these
tokens stand in for them, and the series says so. A cache that no meter watches does nothing of this.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.codec import Codec
from karhunen.monitoring.attention_accuracy import attention_accuracy_delta
from karhunen.statistics.need import SLOTS
from karhunen.store.observer import Leaving

EVERY = 8  # groups of tokens of a sampled layer, of which one is compared
LAYERS = 3  # sampled: the first, the last, those between evenly
COMPARED_TOKENS = 256  # at most, the newest
QUERY_TOKENS = 16  # whose queries are kept

Asked = Literal["queries", "keys"]


@runtime_checkable
class Metered(Protocol):
    """A cache whose layers can be looked at, such as `karhunen.CompressedCache`."""

    codec: Codec

    def coded_layers(self) -> Iterable[Any]:
        """In the order of `codec.windowed`."""
        ...


@final
@dataclass(frozen=True)
class Moved:
    """How far one layer's outputs moved when tokens were last compared, and who asked: the model's queries, or keys in
    their place."""

    delta: float
    asked: Asked


@final
class Meter:
    """Counts over all caches it watches. `every` groups of tokens of each of `n_layers` sampled layers are one time
    compared; 0 layers compare none."""

    def __init__(self, *, every: int = EVERY, n_layers: int = LAYERS) -> None:
        if every < 1 or n_layers < 0:
            raise ValueError(f"every={every}, n_layers={n_layers}: use 1 or more, and 0 layers or more")
        self.every, self.n_layers = every, n_layers
        self.tokens_by_layer: dict[int, int] = {}
        self.encode_seconds = 0.0
        self.moved: dict[int, Moved] = {}

    @property
    def n_encoded(self) -> int:
        """Tokens coded since the meter began, rows counted each, in one layer: all code alike."""
        return max(self.tokens_by_layer.values(), default=0)

    def watch(self, cache: Metered) -> None:
        """Look at this cache from now on."""
        coded = [
            (index, layer)
            for index, layer in zip(cache.codec.windowed, cache.coded_layers(), strict=True)
            if index in cache.codec.layers
        ]
        chosen = sampled([index for index, _ in coded], self.n_layers)
        for index, layer in coded:
            looking = _Looking(self, index, compares=index in chosen)
            layer.store.observers = (*layer.store.observers, looking)
            if looking.compares:
                layer.on_query = looking.asked


def sampled(layers: list[int], n: int) -> list[int]:
    """`n` of them, first and last included where there are two or more."""
    if n < 2 or len(layers) <= n:
        return layers[:n]
    return [layers[round(i * (len(layers) - 1) / (n - 1))] for i in range(n)]


def moved_by(
    leaving: Leaving, queries: Float[Tensor, "q n d"] | None = None, scale: float | None = None
) -> Moved | None:
    """δ of the first row's newest COMPARED_TOKENS; None where nobody can ask: no queries, no exact key after them."""
    granule = leaving.codec.granule_tokens
    n = min(leaving.key.shape[2], max(1, COMPARED_TOKENS // granule) * granule)
    pair = [x[:1, :, -n:] for x in (leaving.key, leaving.value)]
    where = leaving.positions[:1, -n:]
    decoded: list[Tensor] = []
    for slot, x in zip(SLOTS, pair, strict=True):
        made = leaving.codec.side(slot).distort(x, where).to(x.dtype)
        if leaving.kept is not None:
            made = torch.where(leaving.kept[:1, None, -n:, None], x, made)
        decoded.append(made[0])
    asked: Asked = "keys" if queries is None else "queries"
    asking = leaving.recent_key[0] if queries is None else queries
    if asking.shape[1] == 0:
        return None
    grouped = asking.unflatten(0, (leaving.key.shape[1], -1)).flatten(1, 2)  # [h queries·n d]
    n_seen = torch.full((grouped.shape[1],), n, device=where.device)
    exact = (pair[0][0], pair[1][0])
    return Moved(attention_accuracy_delta(grouped, n_seen, exact, (decoded[0], decoded[1]), scale), asked)


@final
class _Looking:
    """At one layer of one cache."""

    def __init__(self, meter: Meter, layer: int, compares: bool) -> None:
        self.meter, self.layer, self.compares = meter, layer, compares
        self.queries: deque[Tensor] = deque(maxlen=QUERY_TOKENS)
        self.scale: float | None = None
        self.n_groups = 0

    def __deepcopy__(self, memo: dict[int, object]) -> "_Looking":
        return self

    def asked(self, query: Tensor, scale: float) -> None:
        """Keeps the newest queries of the first row."""
        self.queries.append(query[0, :, -QUERY_TOKENS:].clone())
        self.scale = scale

    def left(self, leaving: Leaving) -> None:
        """Counts, and compares one group in so many, the first included."""
        meter, n = self.meter, leaving.key.shape[0] * leaving.key.shape[2]
        meter.tokens_by_layer[self.layer] = meter.tokens_by_layer.get(self.layer, 0) + n
        meter.encode_seconds += leaving.seconds
        self.n_groups += 1
        if self.compares and self.n_groups % meter.every == 1 % meter.every:
            queries = torch.cat(list(self.queries), 1)[:, -QUERY_TOKENS:] if self.queries else None
            if (found := moved_by(leaving, queries, self.scale if self.queries else None)) is not None:
                meter.moved[self.layer] = found
