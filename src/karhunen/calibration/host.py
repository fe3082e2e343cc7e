"""Sums are made where a layer is and kept in the host's memory, so that a device holds those of one layer at a time."""

from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import Tensor

from karhunen.device import computes_float64
from karhunen.statistics.need import Statistic

S = TypeVar("S", bound=Statistic)


def on_host(statistic: S) -> S:
    """The same numbers in the host's memory."""
    moved: dict[str, Any] = {f.name: getattr(statistic, f.name).cpu() for f in fields(statistic)}
    return replace(statistic, **moved)


def with_float64(x: Tensor) -> Tensor:
    """The tensor where float64 exists: on its own device, or in the host's memory."""
    return x if computes_float64(x.device) else x.cpu()
