"""Read a beginning once: `generate` for plain transformers models that restores the longest stored prefix from pages.

prompt ─▶ keys of its pages ─▶ store ─▶ longest prefix that is whole ─▶ dense cache ─▶ generate reads the rest
                                 ▲                                                          │
                                 └───────────────── pages that are new ◀────────────────────┘

What is restored is decoded from codes: attention reads what a compressed cache would give it. Pages are coded once,
from exact vectors. A model with layers that forget tokens (sliding, recurrent, convolutional) has their state stored at
the last page edge of each prompt; without a state there is no hit, whatever pages there are.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.hf.cache import dense_cache
from karhunen.hf.describe import identity_of
from karhunen.hf.fingerprint import tokenizer_fingerprint, weights_fingerprint
from karhunen.hf.probe import cache_argument, forward, inference
from karhunen.hf.states import restore_state, state_page
from karhunen.pages import PageCodec, page_keys
from karhunen.stores import Counted, Store

PAGE_TOKENS = 256

Found = tuple[list[tuple[str, bytes]], tuple[str, bytes] | None]  # pages, and the state behind them, with their keys


@final
@dataclass(frozen=True)
class Reuse:
    """What a call found and left. `reason` says why no more was restored; empty if all that could be was."""

    n_prompt: int
    n_restored: int
    n_pages_stored: int
    restore_seconds: float
    store_seconds: float
    reason: str


@final
class PrefixCache:
    """`generate` of `model` with prefixes in `store`, coded by `codec`; `last` says what the last call re-used.

    ValueError if the codec was made for another model, or drops tokens. The store's failures are misses;
    `store.counts` counts them. Several processes, and several models and codecs, may share a store.
    """

    def __init__(
        self, model: nn.Module, codec: Codec, store: Store, tokenizer: Any = None, page_tokens: int = PAGE_TOKENS
    ) -> None:
        codec.check_model(identity_of(model))
        self.model = model
        self.store = store if isinstance(store, Counted) else Counted(store)
        self.pages = PageCodec(
            codec,
            next(model.parameters()).dtype,
            weights_fingerprint(model),
            "" if tokenizer is None else tokenizer_fingerprint(tokenizer),
        )
        self.page_tokens = page_tokens
        self.pages.page_bytes(page_tokens)  # refuses lengths that are no page
        self.last: Reuse | None = None
        n_layers = len(dense_cache(model).layers)
        self.stateful = tuple(i for i in range(n_layers) if i not in self.pages.layers)

    def generate(self, input_ids: Int[Tensor, "b t"], **settings: Any) -> Any:
        """As `model.generate(input_ids, **settings)`, which reads only what no stored prefix holds.

        ValueError for several texts at once, padding, or a cache of the caller's.
        """
        name = cache_argument(self.model)
        mask = settings.pop("attention_mask", None)
        if input_ids.shape[0] != 1 or (mask is not None and not bool(mask.all())):
            raise ValueError(f"{input_ids.shape[0]} rows, or padding: prefixes are those of one text; call it for each")
        if settings.get(name) is not None or settings.get("cache_implementation") is not None:
            raise ValueError(f"a cache was given as {name}, and a prefix cache makes its own; leave it out")
        n_alike = self._n_alike(settings)
        start = time.perf_counter()
        tokens = cast("list[int]", input_ids[0].tolist())
        keys = self.keys(tokens)
        cache, n_restored, reason = self.restore(tokens, keys)
        restored = time.perf_counter()
        n_stored = self._read_to_edge(input_ids, cache, keys, n_restored)
        if n_alike > 1 and cache.get_seq_length():  # beams, or several answers: each has the prompt
            cache.batch_repeat_interleave(n_alike)
        output: Any = cast("Any", self.model).generate(
            input_ids, attention_mask=torch.ones_like(input_ids), **{name: cache}, **settings
        )
        read = time.perf_counter()
        if not self.stateful:
            whole = cast("Tensor", getattr(output, "sequences", output))[0].tolist()
            n_stored = self.keep(tokens if n_alike > 1 else whole, cache, n_restored)
        self.last = Reuse(len(tokens), n_restored, n_stored, restored - start, time.perf_counter() - read, reason)
        return output

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """Of the whole pages of a text."""
        owner = self.pages.owner
        fields = (owner.model, owner.weights, owner.tokenizer, owner.codec, owner.layout)
        return page_keys(b"".join((*fields, self.pages.dtype_name.encode())), tokens, self.page_tokens)

    def restore(self, tokens: Sequence[int], keys: Sequence[str] | None = None) -> tuple[DynamicCache, int, str]:
        """(a cache, how many tokens it holds, why not more): the longest stored prefix that leaves a token to read."""
        usable = list(self.keys(tokens) if keys is None else keys)[: max(0, len(tokens) - 1) // self.page_tokens]
        wanted, refusal = len(usable), ""
        reason = "" if usable else f"a prompt of {len(tokens)} tokens has no page of {self.page_tokens} to restore"
        if not self.pages.layers:
            usable, reason = [], f"no layer of this {type(self.model).__name__} keeps all tokens and nothing else"
        while usable:
            found, reason = self._found(usable)
            reason = refusal or reason
            if not found:
                break
            pages, state = found
            cache = dense_cache(self.model)
            try:
                self._fill(cache, pages, state)
            except _Refused as refused:
                self.store.refuse(refused.key, str(refused))
                reason = refusal = str(refused)
                usable = usable[: refused.page]
                continue
            return cache, len(pages) * self.page_tokens, reason if len(pages) < wanted else ""
        return dense_cache(self.model), 0, reason

    def keep(self, tokens: Sequence[int], cache: DynamicCache, n_restored: int = 0) -> int:
        """Store the pages of `tokens` that `cache` holds and the store does not; how many."""
        n_tokens = min(len(tokens), cache.get_seq_length())
        keys = self.keys(tokens[:n_tokens])
        first = n_restored // self.page_tokens
        if first >= len(keys) or not self.pages.layers:
            return 0
        there = self.store.has_many(keys[first:])
        new = [i for i, is_there in enumerate(there, start=first) if not is_there]
        if not new:
            return 0
        first = new[0]
        run = slice(first * self.page_tokens, (new[-1] + 1) * self.page_tokens)
        layers: dict[int, tuple[Tensor, Tensor]] = {}
        for index in self.pages.layers:
            layer: Any = cache.layers[index]
            layers[index] = (layer.keys[0, :, run].detach(), layer.values[0, :, run].detach())
        try:
            made = self.pages.encode_pages(layers, torch.arange(run.start, run.stop, device=HOST), self.page_tokens)
        except ValueError as error:  # NaN, or vectors of another dtype under autocast: the text is there all the same
            self.store.failed(str(error))
            return 0
        # a page that is there stays: it may be of exact vectors where these were read after a decoded prefix
        return sum(self.store.kept(keys[i], made[i - first]) for i in new)

    def _found(
        self, keys: Sequence[str]
    ) -> tuple[tuple[list[tuple[str, bytes]], tuple[str, bytes] | None] | None, str]:
        """Pages of the longest prefix, and the state behind it where one is needed; or None and why."""
        state, reason, n_failures = None, "", self.store.counts.failures
        if self.stateful:
            there = self.store.has_many([_state_key(key) for key in keys])
            ends = [i for i, is_there in enumerate(there, start=1) if is_there]
            while ends and state is None:
                key = _state_key(keys[ends[-1] - 1])
                data = self.store.get(key)
                if data is None:
                    ends.pop()
                    continue
                state = key, data
            if state is None:
                return None, self._failed_since(n_failures) or (
                    f"layers {list(self.stateful)} keep no tokens, and no state of theirs is stored for this prefix"
                )
            keys = keys[: ends[-1]]
        pages: list[tuple[str, bytes]] = []
        for i, key in enumerate(keys):
            data = self.store.get(key)
            if data is None:
                reason = self._failed_since(n_failures) or f"page {i} of {len(keys)} is not in the store"
                break
            pages.append((key, data))
        if not pages:
            return None, reason
        if self.stateful and len(pages) < len(keys):
            if len(keys) > 1 and (shorter := self._found(keys[: len(pages)]))[0]:
                return shorter[0], reason
            return None, f"{reason}, and no state is stored before it"
        return (pages, state), reason

    def _failed_since(self, n_failures: int) -> str:
        """That the store failed, and how, if it did: a miss for that reason is no sign that nothing was stored."""
        counts = self.store.counts
        return f"the store failed: {counts.last_reason}" if counts.failures > n_failures else ""

    def _fill(self, cache: DynamicCache, pages: Sequence[tuple[str, bytes]], state: tuple[str, bytes] | None) -> None:
        """Pages and state into a new cache; `_Refused` at the first that is not ours."""
        for i, (key, data) in enumerate(pages):
            try:
                frame = self.pages.open(data)
                if (frame.first_token, frame.n_tokens) != (i * self.page_tokens, self.page_tokens):
                    raise ValueError(
                        f"tokens {frame.first_token} to {frame.first_token + frame.n_tokens}, not page {i}"
                    )
                if len(frame.sections) != len(self.pages.layers):
                    raise ValueError(f"a page of {len(frame.sections)} layers, not of {len(self.pages.layers)}")
            except ValueError as error:
                raise _Refused(i, key, error) from error
        device = next(self.model.parameters()).device
        layers: list[Any] = cache.layers
        if state is not None:
            try:
                held = {index: layers[index] for index in self.stateful}
                restore_state(self.pages, state[1], held, len(pages) * self.page_tokens, device)
            except ValueError as error:
                raise _Refused(len(pages) - 1, state[0], error) from error
        try:
            for index, (key, value) in self.pages.decode_layers([data for _, data in pages]):
                layers[index].update(key[None].to(device), value[None].to(device))
        except ValueError as error:
            raise _Refused(len(pages) - 1, pages[-1][0], error) from error

    def _n_alike(self, settings: dict[str, Any]) -> int:
        """Rows that generate makes of the prompt."""
        general: Any = settings.get("generation_config") or getattr(self.model, "generation_config", None)
        asked = (settings.get(name) or getattr(general, name, None) for name in ("num_beams", "num_return_sequences"))
        return max(n or 1 for n in asked)

    def _read_to_edge(
        self, input_ids: Int[Tensor, "1 t"], cache: DynamicCache, keys: Sequence[str], n_restored: int
    ) -> int:
        """Of a model with states: read up to the prompt's last page edge and store pages and state there."""
        edge = (input_ids.shape[1] - 1) // self.page_tokens * self.page_tokens
        if not self.stateful or not self.pages.layers or edge <= n_restored:
            return 0
        with inference(self.model):
            forward(self.model, cache, input_ids[:, n_restored:edge])
        try:
            layers: list[Any] = cache.layers
            state = state_page(self.pages, {index: layers[index] for index in self.stateful}, edge)
        except ValueError as error:
            self.store.failed(str(error))
            return 0
        n_stored = self.keep(input_ids[0, :edge].tolist(), cache, n_restored)
        self.store.put(_state_key(keys[edge // self.page_tokens - 1]), state)
        return n_stored


class _Refused(ValueError):
    """A page, by its number and key, that was found and is not what was wanted."""

    def __init__(self, page: int, key: str, error: ValueError) -> None:
        super().__init__(str(error))
        self.page = page
        self.key = key


def _state_key(key: str) -> str:
    return f"{key}-state"
