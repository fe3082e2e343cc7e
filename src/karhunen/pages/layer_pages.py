"""One layer of a run of pages: keys and values to the sections of each page, and back.

vectors ─▶ planes, side tensors (coded together) ─▶ cut by page and part, exact vectors behind ─▶ sections
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.codec import LayerCodec, Packed
from karhunen.device import HOST, uploaded
from karhunen.pages.exact import most_exact, shortest
from karhunen.pages.frame import LENGTH, SHRUNK, Entry, Frame, Section
from karhunen.pages.plan import KeysValues, PagePlan
from karhunen.pages.sides import SideLayout, opened, raw_bytes, raw_tensor, shrunk
from karhunen.quantizers.base import as_dtype
from karhunen.statistics.need import SLOTS, Slot

Refine = Callable[[Slot, Packed, Int[Tensor, "1 t"], Float[Tensor, "1 h t d"]], None]

ENCODE_TOKENS = 2048  # at most this many tokens are encoded at a time, which bounds the working memory


def encode_layer(
    plan: PagePlan,
    layer: int,
    given: KeysValues,
    positions: Int[Tensor, " t"],
    page_tokens: int,
    exact: Bool[Tensor, " t"] | None,
) -> list[Section]:
    """One layer's bytes, page by page."""
    n_pages, codec = len(positions) // page_tokens, plan.codec.layers.get(layer)
    if codec is None:
        runs = [slice(start, start + page_tokens) for start in range(0, len(positions), page_tokens)]
        sides = [[[[raw_bytes(head)] for head in x[:, run]] for x in given] for run in runs]
        return [_section(plan.entry(layer, 0), b"", key, value, shrinks=False) for key, value in sides]
    kept = _kept(plan, codec, given, positions, page_tokens, exact)
    coded = [
        plan.layouts[layer, slot].taken_apart(
            _coded(plan, codec, slot, x, positions, kept), n_pages, page_tokens,
            plan.parts(plan.layouts[layer, slot]),
        )
        for slot, x in zip(SLOTS, given, strict=True)
    ]  # fmt: skip
    made: list[Section] = []
    for page in range(n_pages):
        start = page * page_tokens
        where = kept[start : start + page_tokens].nonzero()[:, 0]
        sides = [coded[i][page] for i in range(2)]
        for slot, x, side in zip(SLOTS, given, sides, strict=True):
            layout = plan.layouts[layer, slot]
            vectors = x[:, uploaded(start + where, x.device)]
            for i, pieces in enumerate(side):
                pieces.append(raw_bytes(vectors[i : i + 1] if len(layout.parts) > 1 else vectors))
        entry, index = plan.entry(layer, len(where)), b"".join(LENGTH.pack(i) for i in where.tolist())
        made.append(_section(entry, index, sides[0], sides[1], plan.shrinks(codec)))
    return made


def decode_layer(
    plan: PagePlan, layer: int, frames: Sequence[Frame], sections: Sequence[Section], refine: Refine | None = None
) -> KeysValues:
    """The mirror of `encode_layer`: pages that follow each other, as one run of tokens. `refine(slot, codes, positions,
    vectors)` puts better vectors in their places, if it has any."""
    shape, codec = plan.codec.model.layers[layer], plan.codec.layers.get(layer)
    n_heads, dims = len(plan.heads(shape)), (shape.key_dim, shape.value_dim)
    if codec is None:
        key, value = (
            torch.cat(
                [
                    torch.stack([raw_tensor(part, plan.dtype, (frame.n_tokens, dim)) for part in parts])
                    for frame, parts in zip(frames, sides, strict=True)
                ],
                dim=1,
            )
            for dim, sides in zip(dims, ([s.key for s in sections], [s.value for s in sections]), strict=True)
        )
        return key, value
    first, lengths = frames[0].first_token, [frame.n_tokens for frame in frames]
    positions = torch.arange(first, first + sum(lengths), device=HOST)[None]
    where = torch.cat(
        [
            torch.tensor([start + i for (i,) in LENGTH.iter_unpack(section.exact)], dtype=torch.int64, device=HOST)
            for start, section in zip((f.first_token - first for f in frames), sections, strict=True)
        ]
    )
    found: list[Tensor] = []
    for slot, dim in zip(SLOTS, dims, strict=True):
        layout = plan.layouts[layer, slot]
        pages, exact = _parted(plan, layout, slot, frames, sections)
        packed = layout.put_together(pages, plan.parts(layout), lengths)
        x = _from_codec(codec, slot, packed, positions)
        if refine is not None:
            refine(slot, packed, positions, x)
        heads = plan.heads(shape)
        x = as_dtype(x[0, heads.start : heads.stop], plan.dtype)
        if len(where):
            x[:, where] = torch.cat([e.reshape(n_heads, -1, dim) for e in exact], dim=1)
        found.append(x)
    return found[0], found[1]


def _section(entry: Entry, exact: bytes, key: list[list[bytes]], value: list[list[bytes]], shrinks: bool) -> Section:
    sides: list[tuple[tuple[int, ...], tuple[bytes, ...]]] = []
    for side in (key, value):
        lengths: list[int] = []
        parts: list[bytes] = []
        for planes, *others in side:
            smaller = shrunk(planes) if shrinks else None
            parts.append(b"".join((planes if smaller is None else smaller, *others)))
            lengths.append(len(parts[-1]) | (0 if smaller is None else SHRUNK))
        sides.append((tuple(lengths), tuple(parts)))
    (key_lengths, key_parts), (value_lengths, value_parts) = sides
    counts = (entry.first_head, entry.n_heads, entry.all_heads, entry.n_exact)
    made = Entry(entry.layer, entry.kind, *counts, key_lengths, value_lengths)
    return Section(made, exact, key_parts, value_parts)


def _coded(
    plan: PagePlan, codec: LayerCodec, slot: Slot, x: Float[Tensor, "h t d"], positions: Int[Tensor, " t"], kept: Tensor
) -> Packed:
    side = codec.to(x.device).side(slot)
    if plan.shard[1] > 1:  # heads of other shards are zeros; nothing of theirs is taken
        whole = x.new_zeros(side.n_heads, *x.shape[1:])
        start = plan.shard[0] * len(x)
        whole[start : start + len(x)] = x
        x = whole
    positions, kept = positions.to(x.device), kept.to(x.device)
    step = max(1, ENCODE_TOKENS // plan.granule_tokens) * plan.granule_tokens
    runs = [slice(start, start + step) for start in range(0, len(positions), step)]
    made = [side.encode(x[None, :, run], positions[None, run], kept[None, run]) for run in runs]
    names = made[0].side
    return Packed(
        torch.cat([packed.planes for packed in made], dim=-1),
        {name: torch.cat([packed.side[name] for packed in made], dim=-1) for name in names},
    )


def _kept(
    plan: PagePlan,
    codec: LayerCodec,
    given: KeysValues,
    positions: Int[Tensor, " t"],
    page_tokens: int,
    exact: Bool[Tensor, " t"] | None,
) -> Bool[Tensor, " t"]:
    """Tokens that stay exact: sinks, and by the rule the shortest of each page, at most its share."""
    sinks = positions.to(HOST) < plan.codec.window.sink_tokens
    if exact is not None:
        named, room = int(exact.unflatten(0, (-1, page_tokens)).sum(1).max()), 0
        if codec.exceptions is not None:
            room = most_exact(page_tokens)
        if named > room:
            raise ValueError(
                f"`exact` names {named} tokens of a page of {page_tokens}, which has room for {room}; name the "
                "shortest of those that the codec's rule names (karhunen.pages.exact)"
            )
        return sinks | exact.to(sinks.device)
    if codec.exceptions is None:
        return sinks
    if plan.shard[1] > 1:
        raise ValueError(
            "which tokens stay exact is decided by the norm over all heads, and a shard has some; give `exact`"
        )
    return sinks | shortest(codec.exceptions, given, page_tokens)


def _from_codec(codec: LayerCodec, slot: Slot, packed: Packed, positions: Tensor) -> Tensor:
    try:
        return codec.side(slot).decode(packed, positions)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"a page whose side information fits no code ({error}); make it again") from error


def _parted(
    plan: PagePlan, layout: SideLayout, slot: Slot, frames: Sequence[Frame], sections: Sequence[Section]
) -> tuple[list[list[tuple[memoryview, memoryview]]], list[Tensor]]:
    """By page and part (planes, side tensors); and the exact vectors of each page."""
    pages: list[list[tuple[memoryview, memoryview]]] = []
    exact: list[Tensor] = []
    for frame, section in zip(frames, sections, strict=True):
        parts = section.key if slot == "key" else section.value
        lengths = section.entry.key if slot == "key" else section.entry.value
        made: list[tuple[memoryview, memoryview]] = []
        vectors: list[Tensor] = []
        for index, part, length in zip(plan.parts(layout), parts, lengths, strict=True):
            planes, rest = opened(memoryview(part), length, layout.plane_bytes(index, frame.n_tokens))
            n_side, heads = layout.side_bytes(index, frame.n_tokens), layout.heads_of(index)
            shape = (heads.stop - heads.start, section.entry.n_exact, layout.dim)
            want = n_side + shape[0] * shape[1] * shape[2] * plan.dtype.itemsize
            if len(rest) != want:
                raise ValueError(
                    f"a page with {len(rest)} bytes of scales and exact tokens in layer {section.entry.layer}, where "
                    f"{want} belong; make it again"
                )
            made.append((planes, rest[:n_side]))
            vectors.append(raw_tensor(rest[n_side:], plan.dtype, shape))
        pages.append(made)
        exact.append(torch.cat(vectors))
    return pages, exact
