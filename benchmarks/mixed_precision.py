"""A mixed-precision cache after ZipCache: tokens that are looked at in one width of integers, all others in another.

    key, value ─▶ int4 of every token that leaves ─┬─▶ the salient read these     salient: the share whose mean squared
               ─▶ int2 of every token that leaves ─┴─▶ the others read these      weight is largest, as it leaves

Source: ZipCache (arXiv:2405.14256): normalized attention of probe tokens decides, integers per token.
Here:   the probes are a forward's last 128 queries and what they pay is squared, as progressive tokens have it; ranges
        are per token in groups of channels. Both widths are kept, and `bits` counts the one that is read, and a bit of
        each token for the choice.
"""

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from karhunen.allocation.uniform import Uniform
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.hf.cache import dense_cache
from karhunen.hf.describe import identity_of
from karhunen.hf.queries import show_queries
from karhunen.quantizers.affine import Affine, PerToken
from karhunen.recipe import Recipe, Side
from karhunen.statistics.gathered import Statistics
from karhunen.store.layer_store import LayerStore
from karhunen.store.observed import Observed
from karhunen.windows.partition import Place
from karhunen.windows.score import Queries
from karhunen.windows.sink_recent import SinkRecent

NAME = "mixed:"
WIDTHS = (2, 4)


def options(text: str) -> dict[str, float]:
    """Of `mixed:share=0.4,group=64`; ValueError on any other option, and on a share that is none."""
    given = dict(pair.split("=", 1) for pair in text.removeprefix(NAME).split(","))
    if unknown := sorted(given.keys() - {"share", "group"}):
        raise ValueError(f"{text!r} has options {unknown}; known: share (of salient tokens), group (of channels)")
    found = {"share": 0.4, "group": 64.0, **{name: float(value) for name, value in given.items()}}
    if not 0 <= found["share"] <= 1:
        raise ValueError(f"share={found['share']} of the tokens: use a number from 0 to 1")
    return found


def codecs(statistics: Statistics, group: int) -> tuple[Codec, Codec]:
    """The narrow and the wide one."""
    sides = (Side(allocation=Uniform(bits), quantizer=Affine(PerToken(group), fit_group=True)) for bits in WIDTHS)
    low, high = (fit(Recipe("mixed", key=side, value=side, window=SinkRecent(4, 128)), statistics) for side in sides)
    return low, high


@final
class MixedLayer(DynamicLayer):
    """One layer; `store` is the narrow one."""

    is_sliding = False

    def __init__(self, low: LayerStore, high: LayerStore, share: float, n_queries: int = 128) -> None:
        self.store, self.high, self.share = low, high, share
        self.observed = Observed(n_queries)
        self.salient: Tensor | None = None
        self.is_initialized = False

    @property
    def reads_queries(self) -> bool:
        """Those of every forward."""
        return True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens; keys and values of all, each as it is read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self._n_recent
        for store in (self.store, self.high):
            store.extend(key_states, value_states)
        self.observed.extend(key_states.shape[0], self._n_recent - before, key_states.device)
        return self.read()

    def attended(self, queries: Queries, key: Tensor) -> None:
        """The newest tokens' queries have read `key`: what leaves now is decided."""
        self.observed.see_all(queries, key)
        n = self.store.partition.count(Place.CODED) - self.store.n_coded
        if n > 0:
            paid = self.observed.mean(n)
            chosen = torch.zeros_like(paid, dtype=torch.bool)
            chosen.scatter_(1, paid.topk(round(self.share * n), dim=1).indices, True)
            self.salient = chosen if self.salient is None else torch.cat([self.salient, chosen], dim=1)
            self.observed.forget(n)
        for store in (self.store, self.high):
            store.flush()

    def read(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values."""
        low, high = self.store.read(), self.high.read()
        if self.salient is None:
            return low
        first = self.store.exact("key")[0].shape[2]
        coded = slice(first, first + self.salient.shape[1])
        for x, y in zip(low, high, strict=True):
            x[:, :, coded] = torch.where(self.salient[:, None, :, None], y[:, :, coded], x[:, :, coded])
        return low

    @property
    def bytes_and_elements(self) -> tuple[float, int]:
        """What the coded tokens take as they are read, and how many numbers they are."""
        if self.salient is None:
            return 0.0, 0
        share = float(self.salient.float().mean())
        low, high = self.store.account(), self.high.account()
        return low.coded * (1 - share) + high.coded * share + self.salient.numel() / 8, low.n_coded_elements

    @property
    def _n_recent(self) -> int:
        return self.store.exact("key")[1].shape[2] if self.store.n_tokens else 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.store.n_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Every token is visible."""
        return self.store.n_tokens + query_length, 0

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """As transformers': a negative number of tokens goes, or a positive one stays. Coded tokens are not cropped."""
        count, n = int(tokens_to_remove), self.store.n_tokens
        kept = n + count if count <= 0 else count
        n_recent = self._n_recent - (n - kept)
        if n_recent < 0:
            raise ValueError(f"{n - kept} tokens are cropped and {self._n_recent} are exact; crop fewer")
        for store in (self.store, self.high):
            store.crop(kept)
        self.observed.keep(n_recent)


@final
class MixedCache(DynamicCache):
    """Of all layers that the codecs code; its queries are shown until `close`."""

    def __init__(self, model: Any, low: Codec, high: Codec, share: float) -> None:
        low.check_model(identity_of(model))
        layers: list[Any] = list(dense_cache(model).layers)
        for index in low.windowed:
            narrow, wide = (LayerStore(c.layers.get(index), c.window, keep_decoded=True) for c in (low, high))
            layers[index] = MixedLayer(narrow, wide, share)
        super().__init__()
        self.layers = layers
        self._shown: ExitStack = show_queries(model, weakref.ref(self))

    def close(self) -> None:
        """Leave the model as it was."""
        self._shown.close()

    @property
    def bits(self) -> float:
        """For each number of the coded tokens."""
        found = [layer.bytes_and_elements for layer in self.layers if isinstance(layer, MixedLayer)]
        elements = sum(n for _, n in found)
        return 8 * sum(size for size, _ in found) / elements if elements else 0.0


def filled(
    model: Any, made: tuple[Codec, Codec], share: float, cache: Any, queries: Mapping[int, Queries]
) -> MixedCache:
    """That has read a prompt whose dense `cache` and last queries these are."""
    mixed = MixedCache(model, *made, share)
    for index, layer in enumerate(mixed.layers):
        held = cache.layers[index]
        if isinstance(layer, MixedLayer):
            key, _ = layer.update(held.keys, held.values)
            layer.attended(queries[index], key)
        else:
            mixed.layers[index] = held
    return mixed
