"""A window says which tokens are kept exact; the others leave it, in order and by age, to be coded or dropped."""

from abc import ABC, abstractmethod

from karhunen.windows.partition import Partition
from karhunen.windows.small_norm import SmallNorm


class Window(ABC):
    """Decides by token index alone, so that any way of appending the same tokens gives the same partition."""

    @property
    @abstractmethod
    def sink_tokens(self) -> int:
        """Leading tokens that never leave the window."""

    @property
    def exceptions(self) -> SmallNorm | None:
        """Which tokens stay exact among those that leave; None for none."""
        return None

    @property
    def drops(self) -> bool:
        """Whether tokens may end up Dropped."""
        return False

    @abstractmethod
    def partition(self, n_tokens: int, granule: int) -> Partition:
        """Places of `n_tokens` tokens; coded tokens come in multiples of `granule`."""
