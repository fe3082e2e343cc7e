"""Who looks on while tokens are coded: their exact vectors are at hand for the last time."""

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.codec import LayerCodec


@final
@dataclass(frozen=True)
class Leaving:
    """Tokens of one layer that have just been coded. `positions` are negative in padding; `kept` says which are held
    exact as well, None if none can be; `recent_key` are the exact tokens after them; `seconds` is what coding took, as
    the host saw it."""

    codec: LayerCodec
    key: Float[Tensor, "b h t d"]
    value: Float[Tensor, "b h t e"]
    positions: Int[Tensor, "b t"]
    kept: Bool[Tensor, "b t"] | None
    recent_key: Float[Tensor, "b h n d"]
    seconds: float


@runtime_checkable
class Observer(Protocol):
    """Is told of every group of tokens of one layer that leaves its exact window."""

    def left(self, leaving: Leaving) -> None:
        """They are coded now; the tensors are not to be changed, nor kept for long: they are part of larger ones."""
        ...
