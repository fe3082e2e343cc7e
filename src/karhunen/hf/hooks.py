"""Hooks on a model that other threads are using.

torch numbers hooks by a counter that two threads may read at once, so one hook would take another's place; and it
notes in two steps that a hook is given keywords, so a forward of another thread may call it without.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

_LOCK = threading.RLock()

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def before_forward(module: nn.Module, hook: Before, *, first: bool = False) -> Callable[[], None]:
    """`hook(module, args, kwargs)` runs before each forward, before other hooks if `first`; the function returned
    removes it. A forward that began while it was being added or removed passes it by."""
    with _LOCK:
        return module.register_forward_pre_hook(partial(_with_keywords, hook), with_kwargs=True, prepend=first).remove


def after_forward(module: nn.Module, hook: Callable[[nn.Module, Any, Any], Any]) -> Callable[[], None]:
    """`hook(module, args, output)` runs after each forward, also after an error; the function returned removes it."""
    with _LOCK:
        return module.register_forward_hook(hook, always_call=True).remove


def _with_keywords(hook: Before, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    return None if kwargs is None else hook(module, args, kwargs)
