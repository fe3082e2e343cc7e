"""What a store holds: pages by model, codec and kind, and what is no page."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

from karhunen.pages.frame import TOKENS, Frame, read
from karhunen.stores import Store


@final
@dataclass
class Holding:
    """Pages of one model and codec: fingerprints as hex digits; `state` are the last tokens of layers that forget."""

    model: str
    weights: str
    codec: str
    dtype: str
    pages: int = 0
    state: int = 0
    tokens: int = 0
    n_bytes: int = 0


@final
@dataclass
class Inventory:
    """All of a store."""

    holdings: list[Holding]
    damaged: int = 0
    n_bytes: int = 0


def inventory(store: Store) -> Inventory:
    """Every page is read once; the largest holding comes first."""
    found: dict[tuple[str, ...], Holding] = {}
    made = Inventory([])
    for key in list(store.keys()):
        data = store.get(key)
        if data is None:  # dropped since
            continue
        made.n_bytes += len(data)
        try:
            frame = read(data)
        except ValueError:
            made.damaged += 1
            continue
        holding = found.setdefault(_owner(frame), Holding(*_owner(frame)))
        holding.n_bytes += len(data)
        holding.pages += frame.kind == TOKENS
        holding.state += frame.kind != TOKENS
        holding.tokens += frame.n_tokens if _is_first_part(frame) else 0
    made.holdings = sorted(found.values(), key=lambda holding: -holding.n_bytes)
    return made


def remove(store: Store, fingerprint: str = "", damaged: bool = False, all_of_it: bool = False) -> tuple[int, int]:
    """(pages, bytes) removed: those of a model, of weights or of a codec by the first digits of its fingerprint, those
    that are damaged, or all. ValueError if none of these is asked for, or the fingerprint is too short to mean one."""
    if not (fingerprint or damaged or all_of_it):
        raise ValueError("which pages? give a fingerprint as `ls` shows it, damaged, or all")
    if fingerprint and len(fingerprint) < 8:
        raise ValueError(f"{fingerprint!r} is too short to mean one model or codec; give 8 digits or more")

    def goes(data: bytes) -> bool:
        if all_of_it:
            return True
        try:
            owner = _owner(read(data))
        except ValueError:
            return damaged
        return bool(fingerprint) and any(name.startswith(fingerprint) for name in owner[:3])

    return _removed(store, list(store.keys()), goes)


def _removed(store: Store, keys: Iterable[str], goes: Callable[[bytes], bool]) -> tuple[int, int]:
    n_pages = n_bytes = 0
    for key in keys:
        data = store.get(key)
        if data is not None and goes(data):
            store.remove(key)
            n_pages, n_bytes = n_pages + 1, n_bytes + len(data)
    return n_pages, n_bytes


def _owner(frame: Frame) -> tuple[str, str, str, str]:
    owner = frame.owner
    return owner.model.hex(), owner.weights.hex(), owner.codec.hex(), frame.dtype


def _is_first_part(frame: Frame) -> bool:
    """Of pages that are split over ranks, the one that counts the tokens."""
    return not frame.sections or frame.sections[0].entry.first_head == 0
