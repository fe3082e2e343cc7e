"""A task: what was asked for, and what it becomes with a model and its tokenizer.

Task ── prepare(model, tokenizer) ──▶ Prepared ── measure(codec) ──▶ the body of a result
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from karhunen.codec import Codec


class Prepared(ABC):
    """A task with its inputs at hand. What the dense model says is computed at the first codec and shared by all."""

    @property
    @abstractmethod
    def inputs(self) -> str:
        """A fingerprint of everything the model is shown."""

    @abstractmethod
    def measure(self, codec: Codec) -> dict[str, Any]:
        """JSON: what was measured."""


class Task(ABC):
    """A frozen value, part of a result's configuration."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short; the folder of its results."""

    @abstractmethod
    def prepare(self, model: nn.Module, tokenizer: Any, seed: int, limit: int | None) -> Prepared:
        """Make the inputs; ValueError if they do not fit the model."""
