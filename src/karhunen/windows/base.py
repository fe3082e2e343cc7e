"""A window says which tokens are kept exact; the others leave it, in order and by age, to be coded."""

from abc import ABC, abstractmethod

from karhunen.windows.partition import Partition


class Window(ABC):
    """Decides by token index alone, so that any way of appending the same tokens gives the same partition."""

    @property
    @abstractmethod
    def sink_tokens(self) -> int:
        """Leading tokens that never leave the window."""

    @abstractmethod
    def partition(self, n_tokens: int, granule: int) -> Partition:
        """Places of `n_tokens` tokens; coded tokens come in multiples of `granule`."""
