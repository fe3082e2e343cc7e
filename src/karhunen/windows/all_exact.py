"""No token leaves: the uncompressed cache as a recipe."""

from dataclasses import dataclass
from typing import final

from karhunen.windows.base import Window
from karhunen.windows.partition import Partition, Place


@final
@dataclass(frozen=True)
class AllExact(Window):
    """Every token exact."""

    @property
    def sink_tokens(self) -> int:
        """None are needed."""
        return 0

    def partition(self, n_tokens: int, granule: int) -> Partition:
        """One run."""
        return Partition(((Place.EXACT, 0, n_tokens),))
