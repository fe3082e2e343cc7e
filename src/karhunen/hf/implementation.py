"""A model's attention implementation, borrowed by name and given back, in any order and from any thread.

    base ─▶ the newest name that stands over others, else the newest ─▶ … ─▶ base, when the last one is given back

Names stay in transformers' registry: a forward of another thread that has looked one up finds what it stands for.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast, final
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from karhunen.hf.capture import implementations

_LOCK = threading.RLock()


@final
@dataclass
class _Borrowed:
    """What the configurations named before, and who has asked for what since."""

    base: dict[int, tuple[Any, str | None]]
    asked: dict[object, tuple[bool, str]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The one that counts now."""
        over = [name for stands_over, name in self.asked.values() if stands_over]
        return over[-1] if over else list(self.asked.values())[-1][1]


_BORROWED: "WeakKeyDictionary[nn.Module, _Borrowed]" = WeakKeyDictionary()


def borrow(model: nn.Module, name: str, *, stands_over: bool = False) -> Callable[[], None]:
    """The model's attention goes by `name` until the function returned is called, or another borrows it too; one that
    `stands_over` others counts before them. An implementation that was set by hand meanwhile stays."""
    with _LOCK:
        held = _BORROWED.get(model)
        if held is None:
            held = _BORROWED[model] = _Borrowed(implementations(model))
        token = object()
        held.asked[token] = stands_over, name
        held.known.add(name)
        try:
            _set(model, held.name)
        except BaseException:
            _give_back(model, token)
            raise
    return lambda: _give_back(model, token)


def _give_back(model: nn.Module, token: object) -> None:
    with _LOCK:
        held = _BORROWED.get(model)
        if held is None or held.asked.pop(token, None) is None:
            return
        if held.asked:
            _set(model, held.name)
            return
        for config, implementation in held.base.values():
            if config._attn_implementation_internal in held.known:
                config._attn_implementation_internal = implementation
        del _BORROWED[model]


def _set(model: nn.Module, name: str) -> None:
    cast("PreTrainedModel", model).set_attn_implementation(name)
