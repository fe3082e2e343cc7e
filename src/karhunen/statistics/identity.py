"""Which model statistics and codecs belong to: architecture, configuration, and the shape of every cache layer."""

from dataclasses import dataclass, replace
from typing import final

KINDS = ("full", "sliding", "other")


@final
@dataclass(frozen=True)
class LayerShape:
    """One layer of the cache. `kind` is full, sliding, or other (linear state, shared, no cache of its own)."""

    kind: str
    n_kv_heads: int = 0
    n_query_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown layer kind {self.kind!r}; known: {list(KINDS)}")

    @property
    def elements_per_token(self) -> int:
        """Scalars this layer caches for one token of one sequence."""
        return self.n_kv_heads * (self.key_dim + self.value_dim)

    def exchanged(self) -> "LayerShape":
        """With keys for values and values for keys."""
        return replace(self, key_dim=self.value_dim, value_dim=self.key_dim)


@final
@dataclass(frozen=True)
class ModelIdentity:
    """What a codec is bound to; two models with equal identity have interchangeable caches.

    `weights_hash` is empty where weights cannot be read as numbers (some quantized formats); it then matches any.
    """

    architecture: str
    config_hash: str
    weights_hash: str
    layers: tuple[LayerShape, ...]

    def mismatch(self, other: "ModelIdentity") -> str | None:
        """Why an artifact of this model does not fit `other`, or None if it does."""
        if self.architecture != other.architecture:
            return f"it was made for a {self.architecture}, this model is a {other.architecture}"
        if len(self.layers) != len(other.layers):
            return f"it was made for {len(self.layers)} layers, this model has {len(other.layers)}"
        for index, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            if mine != theirs:
                return f"layer {index} differs: made for {mine}, this model has {theirs}"
        if self.config_hash != other.config_hash:
            return f"it was made for configuration {self.config_hash}, this model's is {other.config_hash}"
        if self.weights_hash and other.weights_hash and self.weights_hash != other.weights_hash:
            return (
                f"it was made for weights {self.weights_hash}, this model's are {other.weights_hash} (in float16 the "
                "same model has others: load it in bfloat16 or float32, or calibrate it in float16)"
            )
        return None
