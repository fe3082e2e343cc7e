"""One layer's cache: sinks exact, coded blocks append-only, newest tokens exact, between them what a window drops.

    index   0 ········ sink ················ first coded ·········· + coded ········ n
            [ exact  ][ dropped: no bytes   ][ byte planes, gains  ][ exact (recent) ]

A score (`selection`) drops exact tokens, others of each head, before any is coded. Dropped tokens count in positions
and nowhere else: what is read holds the others only. A token is encoded once, when it leaves the window, from its exact
vector; its bytes never change. What the layer holds depends on the tokens appended, not on how many came at a time.
"""

import math
import time
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.codec import NOT_FINITE, LayerCodec, Packed, as_written, extremes
from karhunen.device import HOST, answers, device_of, uploaded
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.need import SLOTS, Slot
from karhunen.store.account import Account, accounted
from karhunen.store.buffers import TokenBuffer
from karhunen.store.decoded import Decoded
from karhunen.store.exceptions import Exceptions
from karhunen.store.observed import Observed
from karhunen.store.observer import Leaving, Observer
from karhunen.store.pages import PageBuffer
from karhunen.store.plane_counts import base_planes
from karhunen.store.positions import Offsets, Positions
from karhunen.store.refined_state import RefinedState
from karhunen.store.refinements import Refinements
from karhunen.store.selection import Selection
from karhunen.store.snapshot import Snapshot
from karhunen.store.state import BufferState, SelectionState, StoreState
from karhunen.windows.base import Window
from karhunen.windows.partition import Partition, Place
from karhunen.windows.refining import Refining, check_layers
from karhunen.windows.score import Queries
from karhunen.windows.top_scored import TopScored

MOST_NOT_ASKED = 64  # steps whose positions may wait to be asked for
ENCODE_TOKENS = 2048  # at most this many tokens are encoded at a time, which bounds the working memory


@final
class LayerStore:
    """Keys and values of one layer for a batch. `codec=None` keeps every token exact; with `keep_decoded` a read
    decodes only what is new, for the memory of a dense layer."""

    def __init__(self, codec: LayerCodec | None, window: Window, keep_decoded: bool = False) -> None:
        self.codec = codec
        self._decoded = Decoded() if keep_decoded and codec is not None and not codec.is_paged else None
        self.window = window
        if codec is not None:
            check_layers(window, {slot: codec.side(slot).quantizer for slot in SLOTS})
        self.observers: tuple[Observer, ...] = ()  # a branch has none: its tokens are not the watched cache's
        self.reset()

    def reset(self) -> None:
        """Forget everything, positions too."""
        self._sink: dict[Slot, Tensor] = {}
        self._recent: dict[Slot, Tensor] = {}
        self._coded: dict[Slot, dict[str, TokenBuffer | PageBuffer]] = {"key": {}, "value": {}}
        self._n_coded = self._n_dropped = 0
        self._rows_at = Positions()
        self._not_asked: list[tuple[int, Offsets]] = []
        self._exceptions: Exceptions | None = None
        self._forget_decoded()
        self.selection = Selection(self.window) if isinstance(self.window, TopScored) else None
        refines = isinstance(self.window, Refining) and self.codec is not None
        self.refinements = Refinements(self.window) if isinstance(self.window, Refining) and refines else None
        self.observed = Observed(self.window.queries) if isinstance(self.window, Refining) and refines else None

    def branch(self) -> "LayerStore":
        """A store that goes on from here by itself. What is coded and exact is shared until either changes it."""
        twin = LayerStore(self.codec, self.window, self.keeps_decoded)
        twin._sink, twin._recent = dict(self._sink), dict(self._recent)
        twin._coded = {slot: {n: buffer.branch() for n, buffer in self._coded[slot].items()} for slot in SLOTS}
        twin._n_coded, twin._n_dropped, twin._rows_at = self._n_coded, self._n_dropped, self._rows_at
        twin._exceptions, twin.selection = self._exceptions, deepcopy(self.selection)
        twin._not_asked = list(self._not_asked)
        twin.refinements = self.refinements and self.refinements.branch()
        twin.observed = deepcopy(self.observed)
        twin._decoded = None if self._decoded is None else self._decoded.branch()
        return twin

    def state(self) -> StoreState | RefinedState:
        """All that is held, to be written down; `restored` is its mirror."""
        self._ask_offsets()
        coded = {
            slot: {
                name: BufferState(
                    buffer.records if isinstance(buffer, PageBuffer) else buffer.view(),
                    buffer.tokens_per_entry,
                    self._n_coded,
                )
                for name, buffer in self._coded[slot].items()
                if self._n_coded
            }
            for slot in SLOTS
        }
        exact: tuple[dict[str, Tensor], dict[str, Tensor]] = {**self._sink}, {**self._recent}
        chosen = self.selection
        decided = None if chosen is None else SelectionState(chosen.scores, chosen.decided, chosen.chosen_before)
        base = StoreState(*exact, coded, self._n_coded, self._n_dropped, self._rows_at.runs, self._exceptions, decided)
        if self.refinements is None or self.observed is None:
            return base
        paid = self.observed.sums, self.observed.counts
        return RefinedState(base, self.refinements.line, *self.refinements.state(), *paid)

    @classmethod
    def restored(
        cls,
        given: StoreState | RefinedState,
        codec: LayerCodec | None,
        window: Window,
        shape: LayerShape,
        keep_decoded: bool = False,
    ) -> "LayerStore":
        """The store whose `state` this is; ValueError, saying what is wrong, if it is none of this codec."""
        refined = given if isinstance(given, RefinedState) else None
        if (refined is not None) != (isinstance(window, Refining) and codec is not None):
            has, wants = ("has", "have none") if refined is not None else ("has no", "have them")
            raise ValueError(f"it {has} layers of refinement, and its codec's tokens {wants}")
        state = given.base if isinstance(given, RefinedState) else given
        state.check(codec, shape)
        if refined is not None and codec is not None and isinstance(window, Refining):
            refined.check(codec, window)
        device = device_of(state.recent)
        codec = codec if codec is None or device is None else codec.to(device)
        made = cls(codec, window, keep_decoded)
        if refined is not None and codec is not None and isinstance(window, Refining):
            made.refinements = Refinements.restored(window, refined, codec)
            if made.observed is not None:
                made.observed.sums, made.observed.counts = refined.sums, refined.counts
        for slot in SLOTS if state.recent else ():
            made._sink[slot], made._recent[slot] = state.sink[slot], state.recent[slot]
            for name, held in state.coded.get(slot, {}).items():
                pages = codec.side(slot).layout.pages if codec and name == "planes" else None
                if pages is not None:
                    n_rows = state.recent[slot].shape[0]
                    made._coded[slot][name] = PageBuffer.restored(pages, held.data, n_rows, held.n_tokens)
                else:
                    buffer = TokenBuffer(held.tokens_per_entry)
                    buffer.append(held.data)
                    made._coded[slot][name] = buffer
        made._n_coded, made._n_dropped = state.n_coded, state.n_dropped
        made._rows_at, made._exceptions = Positions(tuple((i, offsets) for i, offsets in state.runs)), state.exceptions
        if made.selection is not None and state.selection is not None:
            made.selection.scores = state.selection.scores
            made.selection.decided = state.selection.decided
            made.selection.chosen_before = state.selection.chosen_before
        return made

    def append(
        self,
        key: Float[Tensor, "b h t d"],
        value: Float[Tensor, "b h t e"],
        offsets: Int[Tensor, " b"] | Offsets | None = None,
        queries: Queries | None = None,
    ) -> None:
        """Add tokens at the end; those that leave the window are coded. `queries`: theirs, if the window reads them."""
        self.extend(key, value, offsets)
        if queries is not None and self.waits_for_queries:
            self.observe(queries, self.read()[0])
        self.flush()

    @property
    def waits_for_queries(self) -> bool:
        """Whether what leaves the window is decided by the queries of the coming forward."""
        return self.observed is not None or (self.selection is not None and self.selection.reads_now)

    def observe(self, queries: Queries, key: Float[Tensor, "b h t d"]) -> None:
        """The newest tokens' queries have read `key`, all tokens held."""
        if self.selection is not None:
            self.selection.observe(queries, key)
        if self.observed is not None:
            self._ask_offsets()
            n_gone = self._n_dropped
            padded = self._rows_at.at(0, n_gone + key.shape[2], key.shape[0], key.device) < 0
            self.observed.see_all(queries, key, padded[:, n_gone:] if self._rows_at.runs else None)

    def observe_exact(self, queries: Queries, log_sum: Float[Tensor, "b q m"], mask: Tensor | None) -> None:
        """As `observe`, where the tokens were read from their bytes: `log_sum` is the logarithm of what the softmax
        over all tokens held was divided by, `mask` `[b 1 m t]` what of these was seen."""
        if self.observed is not None:
            key = self._recent["key"]
            here = None if mask is None else mask[..., mask.shape[-1] - key.shape[2] :]
            self.observed.see_exact(queries, key, log_sum, here)

    def extend(
        self,
        key: Float[Tensor, "b h t d"],
        value: Float[Tensor, "b h t e"],
        offsets: Int[Tensor, " b"] | Offsets | None = None,
    ) -> None:
        """Add tokens at the end, exact for now; `flush` codes those that have left the window.

        `offsets` counts the padding to the left of each row: token i of row r stands at position i − offsets[r]. Those
        that are not known on the host yet are asked for when a token is coded or dropped.
        """
        if self.codec is not None and not self._recent:
            self.codec = self.codec.to(key.device)
        if offsets is not None:
            given = offsets if isinstance(offsets, Offsets) else Offsets(offsets)
            self._not_asked.append((self.n_tokens, given))
            if given.is_known:
                self._ask_offsets()
        n_before = self._recent["value"].shape[2] if self._recent else 0
        for slot, given in zip(SLOTS, (key, value), strict=True):
            x = given.detach()  # what is kept needs no graph of how it came about
            if slot not in self._recent:
                self._recent[slot], self._sink[slot] = x[:, :, :0], x[:, :, :0].clone()
            short = self.window.sink_tokens - self._sink[slot].shape[2]
            if short > 0 and self._n_coded == self._n_dropped == 0 and self._recent[slot].shape[2] == 0:
                self._sink[slot] = torch.cat([self._sink[slot], x[:, :, :short]], dim=2)
                x = x[:, :, short:]
            self._recent[slot] = torch.cat([self._recent[slot], x], dim=2)
        if self.observed is not None:
            self.observed.extend(key.shape[0], self._recent["value"].shape[2] - n_before, key.device)

    def _ask_offsets(self) -> None:
        """Find out where the tokens stand that came since the last time; waits for the device."""
        Offsets.ask([offsets for _, offsets in self._not_asked])
        for index, offsets in self._not_asked:
            if self.window.drops and bool(offsets.known.any()):
                self._not_asked.clear()
                raise ValueError(
                    f"{type(self.window).__name__} drops tokens as if every row began at once and cannot serve rows "
                    "padded on the left; run such rows one by one, or use a window that drops nothing"
                )
            self._rows_at = self._rows_at.starting(index, offsets.known)
        self._not_asked.clear()

    def flush(self) -> None:
        """Drop what the window drops, and code the tokens that have left it, in whole granules. Where tokens are coded
        the device is waited for: once to look at them, and once for all layers to learn where they stand."""
        if not self._recent or self.n_tokens == 0:
            return
        if len(self._not_asked) >= MOST_NOT_ASKED or (self.window.drops and self._not_asked):
            self._ask_offsets()
        self._choose()
        parts = self.partition
        self._drop(parts.count(Place.DROPPED) - self._n_dropped)
        n_leaving = parts.count(Place.CODED) - self._n_coded
        if self.codec is not None and n_leaving > 0:
            self._encode(self.codec, n_leaving)

    def _encode(self, codec: LayerCodec, n_leaving: int) -> None:
        start = time.perf_counter()
        self._ask_offsets()
        step = max(1, ENCODE_TOKENS // codec.granule_tokens) * codec.granule_tokens
        scores = None if self.observed is None else self.observed.mean(n_leaving)
        left_out = self._looked_at(codec, n_leaving)
        planes: dict[Slot, Tensor] = {}
        for slot in SLOTS:
            parts = [
                codec.side(slot).encode_finite(
                    self._recent[slot][:, :, at : min(at + step, n_leaving)],
                    self._positions(self._n_coded + at, self._n_coded + min(at + step, n_leaving)),
                    None if left_out is None else left_out[:, at : at + step],
                )
                for at in range(0, n_leaving, step)
            ]
            if self.refinements is not None:
                n_base = base_planes(codec, slot)
                planes[slot] = torch.cat([part.planes[:, n_base:] for part in parts], dim=-1)
                parts = [replace(part, planes=part.planes[:, :n_base]) for part in parts]
            self._store(slot, parts, n_leaving)
        if self.refinements is not None and scores is not None:
            self.refinements.append(self._heat(scores, left_out), codec, planes)
        if self.observers:
            self._show(codec, n_leaving, left_out, time.perf_counter() - start)
        self._n_coded += n_leaving
        self._forget_recent(n_leaving)

    def _show(self, codec: LayerCodec, n_leaving: int, kept: Tensor | None, seconds: float) -> None:
        key, value = (self._recent[slot][:, :, :n_leaving] for slot in SLOTS)
        where = self._positions(self._n_coded, self._n_coded + n_leaving)
        leaving = Leaving(codec, key, value, where, kept, self._recent["key"][:, :, n_leaving:], seconds)
        for observer in self.observers:
            observer.left(leaving)

    def _heat(self, scores: Float[Tensor, "b t"], left_out: Bool[Tensor, "b t"] | None) -> Tensor:
        """Of the tokens that leave: none for padding and for what is kept exact."""
        assert isinstance(self.window, Refining) and self.refinements is not None, "only a rule has heat"
        b, n = scores.shape
        none = self._positions(self._n_coded, self._n_coded + n) < 0
        none = none if left_out is None else none | left_out
        given = self.refinements.given.to(HOST) if self._n_coded else torch.zeros(b, dtype=torch.int64, device=HOST)
        heat = self.window.heat(scores.masked_fill(none, math.nan).to(HOST), self._n_coded, given)
        return uploaded(heat, scores.device)

    def _choose(self) -> None:
        key = self._recent["key"]
        if self.selection is None or (left := self.selection.choose(key, self._n_sink, self.n_tokens)) is None:
            return
        self._n_dropped += key.shape[2] - left.shape[2]
        for slot in SLOTS:
            index = left[..., None].expand(-1, -1, -1, self._recent[slot].shape[3])
            self._recent[slot] = self._recent[slot].gather(2, index)

    def _drop(self, n: int) -> None:
        """Give up the `n` oldest tokens after the sinks: coded ones, then exact ones."""
        if n <= 0:
            return
        self._ask_offsets()
        n_coded = min(n, self._n_coded)
        if n_coded:
            self._forget_decoded()
            for slot in SLOTS:
                for buffer in self._coded[slot].values():
                    buffer.drop(n_coded // buffer.tokens_per_entry)
            self._exceptions = self._exceptions and self._exceptions.after(n_coded)
        self._n_coded -= n_coded
        self._n_dropped += n
        self._forget_recent(n - n_coded)

    def _forget_recent(self, n: int) -> None:
        for slot in SLOTS:
            self._recent[slot] = self._recent[slot][:, :, n:].clone(memory_format=torch.contiguous_format)
        if self.observed is not None:
            self.observed.forget(n)

    def read(self) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t e"]]:
        """Dense keys and values of all tokens held, in the dtype they came in; coded ones are decoded."""
        held = self.snapshot()
        return held.dense(self.codec, "key"), held.dense(self.codec, "value")

    def packed(self, slot: Slot) -> Packed | None:
        """The coded tokens of one side, None if there are none."""
        if self._n_coded == 0:
            return None
        parts = {name: buffer.view() for name, buffer in self._coded[slot].items()}
        return Packed(parts.pop("planes"), parts)

    def snapshot(self) -> Snapshot:
        """What is held now, without a copy; appending more changes nothing in it."""
        packed: dict[Slot, Packed] = {slot: made for slot in SLOTS if (made := self.packed(slot)) is not None}
        return Snapshot(
            dict(self._sink),
            dict(self._recent),
            packed or None,
            self._exceptions,
            self._rows_at,
            self._n_coded,
            self._n_dropped,
            self._decoded,
            self.refinements and self.refinements.held(),
        )

    @property
    def exceptions(self) -> Exceptions | None:
        """Coded tokens that are kept exact as well; None if the codec has no such rule."""
        return self._exceptions

    def exact(self, slot: Slot) -> tuple[Tensor, Tensor]:
        """The exact tokens of one side: (sinks, recent), each [b h t d]."""
        return self._sink[slot], self._recent[slot]

    def crop(self, n_tokens: int) -> None:
        """Keep the first `n_tokens`. Within the coded part, codecs that code single tokens cut their bytes; of a cut
        block the kept tokens stay as their decoded values in the exact part. ValueError where tokens that were dropped
        would have to come back."""
        if n_tokens >= self.n_tokens:
            return
        if n_tokens <= 0:
            self.reset()
            return
        n_sink = self._n_sink
        if self.selection is not None:
            self.selection.check_crop(n_tokens, self._n_dropped)
        elif n_sink < n_tokens < n_sink + self._n_dropped:
            raise ValueError(
                f"{self._n_dropped} tokens after the first {n_sink} were dropped, so the cache cannot end at token "
                f"{n_tokens}; keep {n_sink + self._n_dropped} or more, or start again"
            )
        self._rows_at = self._rows_at.until(n_tokens)
        self._not_asked = [(index, offsets) for index, offsets in self._not_asked if index < n_tokens]
        self._n_dropped = self._n_dropped if n_tokens > n_sink else 0
        if n_tokens < n_sink:
            self._sink = {slot: self._sink[slot][:, :, :n_tokens].clone() for slot in SLOTS}
        after_sink = max(0, n_tokens - n_sink - self._n_dropped)
        if after_sink >= self._n_coded:
            keep = after_sink - self._n_coded
            if self.observed is not None:
                self.observed.keep(keep)
            self._recent = {slot: self._recent[slot][:, :, :keep].clone() for slot in SLOTS}
            return
        assert self.codec is not None, "only a codec codes tokens"
        whole = after_sink // self.codec.granule_tokens * self.codec.granule_tokens
        held = self.snapshot()
        for slot in SLOTS:
            self._recent[slot] = held.coded(self.codec, slot)[:, :, whole:after_sink].clone()
            for buffer in self._coded[slot].values():
                buffer.crop(whole // buffer.tokens_per_entry)
        if self.refinements is not None and self.observed is not None:
            self.refinements.crop(whole)
            self.observed.keep(after_sink - whole, self._n_coded - whole)
        self._forget_decoded()
        self._n_coded = whole
        self._exceptions = self._exceptions and self._exceptions.before(whole)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the given rows of the batch, in that order; rows may repeat."""
        self._forget_decoded()
        self._ask_offsets()
        rows = rows.to(HOST)
        if self.selection is not None:
            self.selection.select(rows)
        if self.refinements is not None and self.observed is not None:
            self.refinements.select(rows)
            self.observed.select(rows)
        for slot in self._recent:
            here = uploaded(rows, self._recent[slot].device)
            self._sink[slot] = self._sink[slot].index_select(0, here)
            self._recent[slot] = self._recent[slot].index_select(0, here)
            for buffer in self._coded[slot].values():
                buffer.select(here)
        self._rows_at = self._rows_at.select(rows)
        if self._exceptions is not None:
            self._exceptions = self._exceptions.select(rows)

    def raise_line(self, line: int) -> None:
        """Give refinements back (`Refinements.raise_line`); ValueError where another cache reads these bytes too."""
        if self.refinements is None:
            return
        if self.refinements.is_shared:
            raise ValueError("its bytes are shared with the cache it branched from; shrink that one before it branches")
        self.refinements.raise_line(line)
        self._forget_decoded()

    @property
    def n_tokens(self) -> int:
        """Tokens appended, dropped ones included: where the next token stands."""
        return self._n_sink + self._n_dropped + self._n_coded + (self._recent["key"].shape[2] if self._recent else 0)

    @property
    def n_dropped(self) -> int:
        """Tokens of which nothing is held."""
        return self._n_dropped

    @property
    def n_coded(self) -> int:
        """Tokens whose bytes are codes."""
        return self._n_coded

    @property
    def keeps_decoded(self) -> bool:
        """Whether a decoded copy of the coded tokens is held too."""
        return self._decoded is not None

    @property
    def keeps_all_from_now_on(self) -> bool:
        """Whether a score that decides once dropped nothing, and more came since than it would have kept."""
        window = self.window
        if not isinstance(window, TopScored) or window.again or self._n_dropped:
            return False
        return window.n_dropped_of(self.n_tokens - self._n_sink, self.n_tokens) > 0

    @property
    def partition(self) -> Partition:
        """Where the tokens belong by the window's rule; of a score's choice, those that it has left."""
        n_tokens = self.n_tokens - (self._n_dropped if self.selection else 0)
        return _partition(self.window, n_tokens, self.codec.granule_tokens if self.codec else 1)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by a name that starts with its kind; `account` counts these and nothing else."""
        held: dict[str, Tensor] = {}
        for slot in self._recent:
            held[f"exact.{slot}.sink"], held[f"exact.{slot}.recent"] = self._sink[slot], self._recent[slot]
            for name, buffer in self._coded[slot].items():
                kind = "codes" if name == "planes" else "side"
                held[f"{kind}.{slot}.{name}"] = buffer.storage()
                if buffer.shared is not None:
                    held[f"{kind}.{slot}.{name}.shared"] = buffer.shared
        if self._exceptions is not None:
            held |= {f"exact.exceptions.{name}": tensor for name, tensor in self._exceptions.tensors().items()}
        if self.selection is not None and self.selection.scores is not None:
            held["side.scores"] = self.selection.scores
        if self.refinements is not None and self.observed is not None:
            held |= self.refinements.tensors() | self.observed.tensors()
        return held

    def account(self) -> Account:
        """Bytes by kind."""
        if not self._recent:
            return Account()
        return accounted(self.tensors(), tuple(self._recent.values()), self.n_tokens, self._n_coded)

    @property
    def _n_sink(self) -> int:
        return self._sink["key"].shape[2] if self._sink else 0

    def _positions(self, start: int, stop: int) -> Int[Tensor, "b t"]:
        like, first = self._recent["key"], self._n_sink + self._n_dropped
        return self._rows_at.at(first + start, first + stop, like.shape[0], like.device)

    def _looked_at(self, codec: LayerCodec, n_leaving: int) -> Bool[Tensor, "b t"] | None:
        """Keep the tokens that the codec's rule names; says which, None without a rule. All that has to be known of the
        tokens is asked in one go; ValueError on NaN or infinity among them."""
        rule = codec.exceptions
        key, value = (self._recent[slot][:, :, :n_leaving] for slot in SLOTS)
        norms = [] if rule is None else [rule.norms(key, value)]
        asked = answers(extremes(key), extremes(value), *norms)
        if not all(math.isfinite(end) for pair in asked[:2] for end in pair.tolist()):
            raise ValueError(NOT_FINITE)
        if rule is None:
            return None
        before = None if self._exceptions is None else self._exceptions.count(key.shape[0])
        group = self.window.group_tokens(codec.granule_tokens)
        first = self._n_sink + self._n_dropped + self._n_coded
        padding = self._rows_at.at(first, first + n_leaving, key.shape[0], HOST) < 0
        exact = rule.named(asked[2], group, self._n_coded, before, padding)
        found = Exceptions.where(exact, key, value, self._n_coded)
        self._exceptions = found if self._exceptions is None else self._exceptions + found
        return uploaded(exact, key.device)

    def _store(self, slot: Slot, parts: list[Packed], n_tokens: int) -> None:
        assert self.codec is not None, "only a codec codes tokens"
        pages = self.codec.side(slot).layout.pages
        for name in ("planes", *parts[0].side):
            tensors = [part.planes if name == "planes" else part.side[name] for part in parts]
            with as_written(tensors[0].device):
                joined = torch.cat(tensors, dim=-1)
            if name not in self._coded[slot]:
                paged = pages if name == "planes" else None
                empty = PageBuffer(paged) if paged else TokenBuffer(n_tokens // joined.shape[-1])
                self._coded[slot][name] = empty
            self._coded[slot][name].append(joined)

    def _forget_decoded(self) -> None:
        if self._decoded is not None:
            self._decoded.forget()


@lru_cache(maxsize=64)
def _partition(window: Window, n_tokens: int, granule_tokens: int) -> Partition:
    """The layers of a cache ask in turn for the same."""
    return window.partition(n_tokens, granule_tokens)
