"""One line to use it: inside `with karhunen.compressed(model, codec):` every `generate` runs on a compressed cache.

Nothing stays on the model when the context closes.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import nn

from karhunen.codec import Codec
from karhunen.hf.attention import reading_bytes
from karhunen.hf.cache import CompressedCache
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

    def start(self, model: nn.Module, codec: Codec) -> CompressedCache:
        """A new cache for the next call."""
        self.cache = CompressedCache(model, codec, self.exact_dtype)
        self._started.append(weakref.ref(self.cache))
        return self.cache

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
    session, name = Session(exact_dtype), cache_argument(model)
    own, plain = vars(model).get("generate"), cast("Any", model).generate  # own: that of a context around this one

    def generate(*args: Any, **kwargs: Any) -> Any:
        settings = kwargs.get("generation_config")
        if kwargs.get("cache_implementation") or getattr(settings, "cache_implementation", None):
            raise ValueError("cache_implementation asks for another cache inside karhunen.compressed; leave it out")
        kwargs = {k: v for k, v in kwargs.items() if k not in CACHE_ARGUMENTS or v is not None}
        if kwargs.get("use_cache", True) and not kwargs.keys() & CACHE_ARGUMENTS:
            kwargs[name] = session.start(model, codec)
        return plain(*args, **kwargs)

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = any(kwargs.get(key) is not None for key in CACHE_ARGUMENTS)
        if kwargs.get("use_cache") is not True or given:
            return None
        return args, {**kwargs, name: session.start(model, codec)}

    handle = model.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
    cast("Any", model).generate = generate
    try:
        with reading_bytes(model):
            yield session
    finally:
        handle.remove()
        if own is None:
            del cast("Any", model).generate
        else:
            cast("Any", model).generate = own
        session.close()
