"""What of a model decides its memory: the layers of its cache by kind, and its weights by how often they are read.

bytes of a layer = (K + V) · H_kv · tokens · bytes of a number,    tokens: all, or a window's at most
                 + a state that does not grow

full      keys and values of all tokens
latent    one latent of all tokens in place of keys and values (MLA); its rotary part beside it
sliding   keys and values of the newest `window_tokens`
linear    a state of fixed size (recurrent, convolutional), no tokens
shared    nothing: the layer reads another layer's cache
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

Kind = Literal["full", "latent", "sliding", "linear", "shared"]
KINDS: tuple[Kind, ...] = ("full", "latent", "sliding", "linear", "shared")
GROWING: tuple[Kind, ...] = ("full", "latent")
BITS: Mapping[str, float] = {
    "float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "int8": 8, "int4": 4.5,
}  # fmt: skip
"""Bits of a number in each dtype; int4 with a float16 scale and zero for each 64."""
EXACT_BITS = 16  # what ratios are against


@final
@dataclass(frozen=True)
class CacheLayer:
    """One layer's cache. Numbers of states that do not grow with the text: `state` in the cache's dtype (convolutions),
    `recurrent` in float32 whatever that is. `note` says what is not counted, or why it is what it is."""

    kind: Kind
    n_kv_heads: int = 0
    n_query_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int | None = None
    state: int = 0
    recurrent: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown layer kind {self.kind!r}; known: {', '.join(KINDS)}")
        if (self.kind == "sliding") != (self.window_tokens is not None):
            raise ValueError(f"a {self.kind} layer with a window of {self.window_tokens} tokens; sliding ones have one")

    @property
    def codable(self) -> bool:
        """Whether it keeps every token and nothing else: what coding makes smaller."""
        return self.kind in GROWING and not self.state_bytes()

    @property
    def elements_per_token(self) -> int:
        """Numbers cached for a token of a sequence."""
        return self.n_kv_heads * (self.key_dim + self.value_dim)

    def dense_bytes(self, n_tokens: int, bits: float = EXACT_BITS) -> float:
        """Of one sequence in an uncompressed cache of `bits` a number."""
        kept = n_tokens if self.window_tokens is None else min(n_tokens, self.window_tokens)
        return self.elements_per_token * kept * bits / 8 + self.state_bytes(bits)

    def state_bytes(self, bits: float = EXACT_BITS) -> float:
        """Of one sequence, whatever its length."""
        return (self.state * bits + self.recurrent * BITS["float32"]) / 8


@final
@dataclass(frozen=True)
class Weights:
    """Parameters by how a decode step reads them: `expert` ones as far as tokens visit them, `looked_up` ones (an input
    embedding that is not the head as well) a row at a time, the others whole. A token visits `n_used` of `n_experts`
    experts. Bits are those of the published checkpoint."""

    n_parameters: int
    n_expert: int = 0
    n_looked_up: int = 0
    n_experts: int = 1
    n_used: int = 1
    expert_bits: float = EXACT_BITS
    other_bits: float = EXACT_BITS

    def __post_init__(self) -> None:
        if not 0 <= self.n_expert + self.n_looked_up <= self.n_parameters or not self.n_parameters:
            raise ValueError(f"{self.n_expert} + {self.n_looked_up} parameters of {self.n_parameters}")
        if not 1 <= self.n_used <= self.n_experts:
            raise ValueError(f"a token visits {self.n_used} of {self.n_experts} experts; give 1 to all of them")

    def held_bytes(self, bits: float | None = None) -> float:
        """All of them, at `bits` a number or as published."""
        return sum(n * b for n, b in self._parts(bits)) / 8

    def read_bytes(self, batch: int, bits: float | None = None) -> float:
        """Of one decode step of `batch` sequences: of the experts those that one token or more visits, on average if
        each visits any, 1 − (1 − used ÷ experts)^batch."""
        visited = 1 - (1 - self.n_used / self.n_experts) ** batch
        (n_expert, expert_bits), (n_other, other_bits) = self._parts(bits)
        return (n_expert * visited * expert_bits + (n_other - self.n_looked_up) * other_bits) / 8

    def _parts(self, bits: float | None) -> tuple[tuple[int, float], tuple[int, float]]:
        of_expert, of_other = (self.expert_bits, self.other_bits) if bits is None else (bits, bits)
        return (self.n_expert, of_expert), (self.n_parameters - self.n_expert, of_other)


@final
@dataclass(frozen=True)
class ModelShape:
    """A model as planning sees it. `weights` is None where nothing says how many there are; `source` says where the
    numbers are from; `positions` is the longest text the model takes, None if it does not say."""

    name: str
    architecture: str
    source: str
    layers: tuple[CacheLayer, ...]
    weights: Weights | None = None
    positions: int | None = None
    key_bias: bool = False
    learned_sinks: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"{self.name} has no layers")

    @cached_property
    def alike(self) -> tuple[tuple[CacheLayer, int], ...]:
        """Different layers and how many there are of each, in the order of their kinds."""
        found = Counter(self.layers)
        return tuple(sorted(found.items(), key=lambda pair: (KINDS.index(pair[0].kind), -pair[1])))

    def dense_bytes(self, n_tokens: int, bits: float = EXACT_BITS) -> float:
        """Of one sequence in an uncompressed cache."""
        return sum(n * layer.dense_bytes(n_tokens, bits) for layer, n in self.alike)

    @property
    def codable(self) -> tuple[CacheLayer, ...]:
        """The layers that coding makes smaller."""
        return tuple(layer for layer in self.layers if layer.codable)

    @property
    def n_kv_heads(self) -> int:
        """Of the layers that can be coded, the fewest; 0 if none can."""
        return min((layer.n_kv_heads for layer in self.codable), default=0)
