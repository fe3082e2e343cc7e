"""Pages cut and joined as bytes: between heads (tensor parallel) and between layers. Nothing is decoded.

    join_heads([cut_heads(page, i, n) for i in range(n)]) == page

A page is cut where every side of every layer has a part for each head. What is cut holds the same tokens, exact ones
too, and the same codes; a codec's shard reads it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from karhunen.pages.frame import Entry, Frame, Section, read, with_sections


def cut_heads(page: bytes, part: int, n_parts: int) -> bytes:
    """Part `part` of `n_parts` of each layer's heads; ValueError, with the layer, where heads cannot be told apart."""
    if not 0 <= part < n_parts:
        raise ValueError(f"part {part} of {n_parts} is not one of them; parts count from 0")
    frame = read(page)
    return with_sections(frame, [_cut(section, part, n_parts) for section in frame.sections]).write()


def join_heads(pages: Sequence[bytes]) -> bytes:
    """Pages of neighbouring heads as one; ValueError if they are not of the same tokens, or have gaps."""
    frames = _alike(pages)
    layers = [[section.entry.layer for section in frame.sections] for frame in frames]
    if any(found != layers[0] for found in layers):
        raise ValueError(f"pages with different layers {layers} cannot be joined head by head")
    together = zip(*(frame.sections for frame in frames), strict=True)
    return with_sections(frames[0], [_joined(sections) for sections in together]).write()


def join_layers(pages: Sequence[bytes]) -> bytes:
    """Pages of different layers as one; ValueError if they are not of the same tokens, or a layer comes twice."""
    frames = _alike(pages)
    sections = sorted((s for frame in frames for s in frame.sections), key=lambda s: s.entry.layer)
    if any(a.entry.layer == b.entry.layer for a, b in pairwise(sections)):
        raise ValueError(f"layer(s) {[s.entry.layer for s in sections]} come twice; give each once")
    return with_sections(frames[0], sections).write()


def cut_layers(page: bytes, layers: Sequence[int]) -> bytes:
    """A page of some of its layers."""
    frame = read(page)
    held = {section.entry.layer: section for section in frame.sections}
    if missing := sorted(set(layers) - held.keys()):
        raise ValueError(f"layers {missing} are not in this page; it holds {sorted(held)}")
    return with_sections(frame, [held[layer] for layer in sorted(set(layers))]).write()


def _alike(pages: Sequence[bytes]) -> list[Frame]:
    frames = [read(page) for page in pages]
    if not frames:
        raise ValueError("there is no page to join")
    for frame in frames[1:]:
        if replace(frame, sections=()) != replace(frames[0], sections=()):
            reason = frame.owner.mismatch(frames[0].owner) or "other tokens or another dtype"
            raise ValueError(f"pages that do not belong together: {reason}")
    return frames


def _cut(section: Section, part: int, n_parts: int) -> Section:
    entry = section.entry
    for name, parts in (("keys", section.key), ("values", section.value)):
        if len(parts) != entry.n_heads:
            raise ValueError(f"layer {entry.layer} cannot be cut: its {name} are coded over all heads at once")
    if entry.n_heads % n_parts:
        raise ValueError(f"layer {entry.layer} cannot be cut into {n_parts} parts: it has {entry.n_heads} heads")
    n = entry.n_heads // n_parts
    mine = slice(part * n, (part + 1) * n)
    made = replace(
        entry, first_head=entry.first_head + mine.start, n_heads=n, key=entry.key[mine], value=entry.value[mine]
    )
    return Section(made, section.exact, section.key[mine], section.value[mine])


def _joined(sections: Sequence[Section]) -> Section:
    entries = [section.entry for section in sections]
    for a, b in pairwise(entries):
        if a.first_head + a.n_heads != b.first_head or a.all_heads != b.all_heads or a.kind != b.kind:
            raise ValueError(
                f"layer {a.layer}: heads from {b.first_head} on do not follow heads {a.first_head} to "
                f"{a.first_head + a.n_heads - 1}"
            )
    if any(bytes(section.exact) != bytes(sections[0].exact) for section in sections):
        raise ValueError(f"layer {entries[0].layer}: the pages keep other tokens exact; join pages of one coding")
    first = entries[0]
    entry = Entry(
        first.layer, first.kind, first.first_head, sum(e.n_heads for e in entries), first.all_heads, first.n_exact,
        tuple(n for e in entries for n in e.key), tuple(n for e in entries for n in e.value),
    )  # fmt: skip
    key, value = (tuple(p for s in sections for p in getattr(s, slot)) for slot in ("key", "value"))
    return Section(entry, sections[0].exact, key, value)
