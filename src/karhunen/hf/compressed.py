"""One line to use it: inside `with karhunen.compressed(model, codec):` every `generate` runs on a compressed cache.

    generate, or a forward ─▶ the innermost context of this thread or task, else the one opened last ─▶ its session

Contexts of one model may be open in several threads or tasks and close in any order; when the last one closes nothing
stays on the model.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from karhunen.codec import Codec
from karhunen.hf.attention import reading_bytes
from karhunen.hf.cache import CompressedCache
from karhunen.hf.hooks import before_forward
from karhunen.hf.probe import cache_argument
from karhunen.store.report import Report

CACHE_ARGUMENTS = {"cache", "past_key_values"}


def make_cache(model: nn.Module, codec: Codec, exact_dtype: torch.dtype | None = None) -> dict[str, CompressedCache]:
    """A new cache under the argument's name: `model.generate(**inputs, **make_cache(model, codec))`."""
    return {cache_argument(model): CompressedCache(model, codec, exact_dtype)}


@final
class Session:
    """What ran inside `compressed`: the cache of the last call and its report."""

    def __init__(self, exact_dtype: torch.dtype | None = None) -> None:
        self.exact_dtype = exact_dtype
        self.cache: CompressedCache | None = None
        self._started: list[weakref.ref[CompressedCache]] = []

    def start(self, model: nn.Module, codec: Codec, *, inside: bool = False) -> CompressedCache:
        """A new cache for the next call; one for a forward `inside` a call, such as that of classifier-free guidance,
        is not the one that is reported."""
        cache = CompressedCache(model, codec, self.exact_dtype)
        if not inside:
            self.cache = cache
        self._started.append(weakref.ref(cache))
        return cache

    def close(self) -> None:
        """No cache of this session watches the model any more."""
        for reference in self._started:
            if (cache := reference()) is not None:
                cache.close()

    def report(self) -> Report:
        """Report of the last call's cache; ValueError if nothing ran."""
        if self.cache is None:
            raise ValueError("nothing was generated inside this context yet")
        return self.cache.report()


@contextmanager
def compressed(model: nn.Module, codec: Codec, exact_dtype: torch.dtype | None = None) -> Iterator[Session]:
    """Every `model.generate` (a pipeline's too), and every forward with `use_cache=True` and no cache, gets a new
    compressed cache; attention that was `sdpa` reads its bytes. A cache that the caller passes is left alone;
    `cache_implementation` is refused (ValueError)."""
    CompressedCache(model, codec).close()  # refuses the wrong model here rather than inside the first call
    opened = _Opened(Session(exact_dtype), codec)
    with _LOCK:
        patched = _PATCHED.get(model) or _Patched(model)
        patched.opened.append(opened)
    _MINE.set((*_MINE.get(), opened))
    try:
        yield opened.session
    finally:
        _MINE.set(tuple(other for other in _MINE.get() if other is not opened))
        with _LOCK:
            patched.opened.remove(opened)
            if not patched.opened:
                patched.undo()
        opened.session.close()


@final
class _Opened:
    """One context, told from others by being itself."""

    def __init__(self, session: Session, codec: Codec) -> None:
        self.session = session
        self.codec = codec


@final
class _Patched:
    """A model while contexts of it are open: its `generate` and its forward ask which of them they serve."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.opened: list[_Opened] = []
        self.name = cache_argument(model)
        self.own, self.plain = vars(model).get("generate"), cast("Any", model).generate
        self.made = self.generate  # one object: every look at a method makes another
        _PATCHED[model] = self
        cast("Any", model).generate = self.made
        self.undoing = ExitStack()
        self.undoing.callback(before_forward(model, self.before_forward, first=True))
        self.undoing.enter_context(reading_bytes(model))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with a new cache unless the caller gives one."""
        opened, model = self.now, self.model()
        if opened is None or model is None:
            return self.plain(*args, **kwargs)
        _refuse_settings(model, opened.codec, kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS or v is not None}
        if kwargs.get("use_cache", True) and not kwargs.keys() & CACHE_ARGUMENTS:
            kwargs[self.name] = opened.session.start(model, opened.codec)
        token = _GENERATING.set(True)
        try:
            return self.plain(*args, **kwargs)
        finally:
            _GENERATING.reset(token)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new cache for a forward that would make one."""
        if (opened := self.now) is None:
            return None
        given = any(kwargs.get(key) is not None for key in CACHE_ARGUMENTS)
        if kwargs.get("use_cache") is not True or given:
            return None
        return args, {**kwargs, self.name: opened.session.start(module, opened.codec, inside=_GENERATING.get())}

    @property
    def now(self) -> _Opened | None:
        """The context that is meant here; a thread that opened none, such as one that streams, gets the newest."""
        opened = tuple(self.opened)
        mine = [one for one in _MINE.get() if one in opened]
        return (mine or opened or (None,))[-1]

    def undo(self) -> None:
        """The model as it was; a `generate` that somebody put around this one stays, and finds no context open."""
        self.undoing.close()
        if (model := self.model()) is None:
            return
        _PATCHED.pop(model, None)
        if vars(model).get("generate") is not self.made:
            return
        if self.own is None:
            del cast("Any", model).generate
        else:
            cast("Any", model).generate = self.own


def _refuse_settings(model: nn.Module, codec: Codec, given: dict[str, Any]) -> None:
    """ValueError for what `generate` was asked and a compressed cache cannot do."""

    def asked(name: str) -> Any:
        settings = given.get("generation_config") or getattr(model, "generation_config", None)
        return given.get(name) or getattr(settings, name, None)

    if asked("cache_implementation"):
        raise ValueError("cache_implementation asks for another cache inside karhunen.compressed; leave it out")
    if codec.window.reads == "once" and (size := asked("prefill_chunk_size")):
        raise ValueError(
            f"prefill_chunk_size={size} cuts the prompt, and recipe {codec.origin.recipe} chooses tokens once, after "
            "the first part of it; leave it out, or use a recipe that chooses again, such as h2o"
        )


_LOCK = threading.RLock()
_PATCHED: "WeakKeyDictionary[nn.Module, _Patched]" = WeakKeyDictionary()
_MINE: ContextVar[tuple[_Opened, ...]] = ContextVar("mine", default=())
"""Contexts that this thread or task has opened, the innermost last."""
_GENERATING: ContextVar[bool] = ContextVar("generating", default=False)
"""Whether a `generate` of ours is running in this thread or task."""
