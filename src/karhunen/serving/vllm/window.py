"""The last tokens of sliding layers at the end of a page, as they are: without them pages alone restore nothing.

frame of kind STATE, first_token = tokens read so far; one entry for each layer, its parts the heads' vectors
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from karhunen.pages import PageCodec
from karhunen.pages.frame import EXACT, STATE, Entry, Frame, Section, read
from karhunen.pages.plan import KeysValues
from karhunen.pages.sides import raw_bytes, raw_tensor


@final
class WindowPages:
    """Written and read for one codec; `dims` are (key, value) sizes by layer."""

    def __init__(self, pages: PageCodec, dims: Mapping[int, tuple[int, int]]) -> None:
        self.pages = pages
        self.dims = dict(dims)

    def write(self, layers: Mapping[int, KeysValues], n_tokens: int) -> bytes:
        """Of the layers' last tokens, each `[heads, its window, size]`, after `n_tokens`."""
        sections: list[Section] = []
        for layer, pair in sorted(layers.items()):
            shape = self.pages.codec.model.layers[layer]
            heads = self.pages.plan.heads(shape)
            parts = [tuple(raw_bytes(head) for head in x) for x in pair]
            lengths = [tuple(len(part) for part in side) for side in parts]
            entry = Entry(layer, EXACT, heads.start, len(heads), shape.n_kv_heads, 0, lengths[0], lengths[1])
            sections.append(Section(entry, b"", parts[0], parts[1]))
        return Frame(STATE, self.pages.dtype_name, self.pages.owner, n_tokens, 0, tuple(sections)).write()

    def read(self, page: bytes, n_tokens: int, lengths: Mapping[int, int]) -> dict[int, tuple[Tensor, Tensor]]:
        """The mirror of `write`; `lengths` are the tokens wanted of each layer. ValueError, with the reason, if it is
        damaged, another's, or of other tokens."""
        frame = read(page)
        if frame.kind != STATE:
            raise ValueError("this is a page of tokens, not the last tokens of sliding layers")
        if reason := frame.owner.mismatch(self.pages.owner):
            raise ValueError(f"last tokens that are not ours: {reason}")
        if (frame.first_token, frame.dtype) != (n_tokens, self.pages.dtype_name):
            raise ValueError(f"last tokens after {frame.first_token} tokens in {frame.dtype}, not after {n_tokens}")
        held = {section.entry.layer: section for section in frame.sections}
        if held.keys() != lengths.keys():
            raise ValueError(f"last tokens of layers {sorted(held)}, wanted are those of {sorted(lengths)}")
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, section in held.items():
            heads = self.pages.plan.heads(self.pages.codec.model.layers[layer])
            sides: list[Tensor] = []
            for parts, dim in zip((section.key, section.value), self.dims[layer], strict=True):
                want = lengths[layer] * dim * self.pages.dtype.itemsize
                if len(parts) != len(heads) or any(len(part) != want for part in parts):
                    raise ValueError(f"last tokens of layer {layer} of other heads or another window; make them again")
                shape = (lengths[layer], dim)
                sides.append(torch.stack([raw_tensor(bytes(part), self.pages.dtype, shape) for part in parts]))
            found[layer] = (sides[0], sides[1])
        return found
