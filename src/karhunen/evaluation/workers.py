"""Processes that share the work of one command and end with it.

Ctrl-C reaches every process of a terminal at once. Workers do not hear it: the process that asked for them does, and
ends them, so that one line says what happened and no worker goes on with what nobody waits for.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Any


@contextmanager
def workers(
    n: int, start: Callable[..., None] | None = None, settings: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A pool of `n` new processes; each calls `start(*settings)` first. If the block is left by an exception, they are
    ended at once. Submit inside `unheard`."""
    before = set(active_children())
    pool = ProcessPoolExecutor(n, mp_context=get_context("spawn"), initializer=start, initargs=settings)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown()


@contextmanager
def unheard() -> Iterator[None]:
    """Processes started here never hear Ctrl-C; this one hears it when the block ends."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """A worker whose parent was killed stops too: nobody waits for what it does."""
    parent = parent_process()
    if parent is not None:
        Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
