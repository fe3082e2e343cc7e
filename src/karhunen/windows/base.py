"""A window says which tokens are kept exact; the others leave it, in order and by age, to be coded or dropped.

`TopScored` drops by score, head by head, before that; its partition is that of the tokens which are left.
"""

from abc import ABC, abstractmethod

from karhunen.windows.partition import Partition
from karhunen.windows.score import Reads
from karhunen.windows.small_norm import SmallNorm


class Window(ABC):
    """A partition is decided by token index alone: any way of appending the same tokens gives the same one."""

    @property
    @abstractmethod
    def sink_tokens(self) -> int:
        """Leading tokens that never leave the window."""

    @property
    def exceptions(self) -> SmallNorm | None:
        """Which tokens stay exact among those that leave; None for none."""
        return None

    @property
    def recent_tokens(self) -> int | None:
        """Newest tokens that are exact when they are read; None where a window promises none."""
        return None

    @property
    def drops(self) -> bool:
        """Whether tokens may end up Dropped."""
        return False

    @property
    def reads(self) -> Reads:
        """Which forwards' queries decide what is dropped or refined: none, the first one's, or all."""
        return "never"

    @property
    def token_bits(self) -> float:
        """Bits stored for each coded token of a layer beside its codes."""
        return 0.0

    def group_tokens(self, granule: int) -> int:
        """Tokens are coded in multiples of this; what is decided about a group depends on no other way of appending."""
        return granule

    @abstractmethod
    def partition(self, n_tokens: int, granule: int) -> Partition:
        """Places of `n_tokens` tokens; coded tokens come in multiples of `granule`."""
