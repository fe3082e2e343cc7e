"""The closed-form correction of W_O for what a codec does to attention: one pass over text, no training.

per layer and query row m:   a_m = Σ_n softmax(q_mᵀ k_n) v_n,   a′_m the same with coded far tokens
W_O′ = (E[a′ᵀa′] + λI)⁻¹ E[a′ᵀa] W_O

Source: SPECTRA (arXiv:2608.07915). No cost at run time.
Here: keys may be coded as well as values, and tokens that the codec's window keeps exact for a row (sinks, the newest)
are exact in a′ too, so that the correction is that of decoding. Layers see the dense model's hidden states.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from karhunen.calibration.reading import group_of_heads, raw_scores, softmax_rows
from karhunen.calibration.tokens import Input, sequences
from karhunen.codec import Codec, LayerCodec
from karhunen.device import HOST
from karhunen.hf.capture import Observation, capturing
from karhunen.hf.describe import identity_of
from karhunen.hf.output_weights import output_weights
from karhunen.hf.probe import n_positions
from karhunen.statistics.need import SLOTS, Slot
from karhunen.statistics.outputs import OutputPairs, best_corrected_weight, corrected_weight
from karhunen.windows.base import Window
from karhunen.windows.partition import Place

Progress = Callable[[int, int], None]

ROWS = 128  # query rows at a time; bounds the table of scores


HELD_OUT = 4  # every so many sequences one is kept to choose the ridge by


def correct_outputs(
    model: nn.Module,
    codec: Codec,
    texts: Input,
    tokenizer: object = None,
    *,
    max_tokens: int = 16384,
    sequence_tokens: int = 2048,
    progress: Progress | None = None,
) -> dict[int, Float[Tensor, "hidden n"]]:
    """W_O′ of every coded layer; its ridge is the one that serves held-out sequences of the text best.

    A layer that no ridge serves keeps its W_O. ValueError as in `measure_outputs`, and for less than two sequences.
    """
    pieces = _pieces(model, codec, texts, tokenizer, max_tokens, sequence_tokens)
    if len(pieces) < 2:
        raise ValueError("one sequence of text cannot both fit and judge a correction; use more text")
    held = set(range(HELD_OUT - 1, len(pieces), HELD_OUT)) or {len(pieces) - 1}
    parts = [[p for i, p in enumerate(pieces) if (i in held) == kept] for kept in (False, True)]
    first, total = (sum(map(len, some)) for some in (parts[0], pieces))

    def advance(before: int, done: int, _: int) -> None:
        if progress is not None:
            progress(before + done, total)

    fitted, judged = (
        _measure(model, codec, part, SLOTS, partial(advance, before))
        for part, before in zip(parts, (0, first), strict=True)
    )
    return corrections(model, fitted, held_out=judged)


def measure_outputs(
    model: nn.Module,
    codec: Codec,
    texts: Input,
    tokenizer: object = None,
    *,
    coded: Iterable[Slot] = SLOTS,
    max_tokens: int = 16384,
    sequence_tokens: int = 2048,
    progress: Progress | None = None,
) -> dict[int, OutputPairs]:
    """Coded and dense pre-W_O vectors of every coded layer, summed over the rows that read coded tokens.

    `coded` says which sides are taken through the codec. ValueError if the codec is another model's, if no row reads a
    coded token (sequences shorter than the window), or if a layer's queries are not seen.
    """
    pieces = _pieces(model, codec, texts, tokenizer, max_tokens, sequence_tokens)
    return _measure(model, codec, pieces, tuple(coded), progress)


def corrections(
    model: nn.Module,
    pairs: Mapping[int, OutputPairs],
    ridge: float = 1e-1,
    towards_weight: bool = True,
    held_out: Mapping[int, OutputPairs] | None = None,
) -> dict[int, Float[Tensor, "hidden n"]]:
    """W_O′ of every measured layer, for `hf.output_weights.with_output_weights` or `bake`.

    With pairs of `held_out` text each layer takes the ridge that serves that text best, or no correction: a text of few
    rows per input of W_O corrects its own noise.
    """
    own = output_weights(model, {layer: len(found.gram) for layer, found in pairs.items()})
    if held_out is not None:
        return {layer: best_corrected_weight(own[layer], found, held_out[layer]) for layer, found in pairs.items()}
    return {layer: corrected_weight(own[layer], found, ridge, towards_weight) for layer, found in pairs.items()}


def _pieces(
    model: nn.Module, codec: Codec, texts: Input, tokenizer: object, max_tokens: int, sequence_tokens: int
) -> list[Int[Tensor, " _"]]:
    """The text in sequences in which some row reads a coded token."""
    codec.check_model(identity_of(model))
    if codec.window.drops:
        raise ValueError(
            f"{type(codec.window).__name__} drops tokens, and outputs are corrected for what coding changes, not for "
            "what is gone; use a window that drops nothing"
        )
    length = min(sequence_tokens, n_positions(model))
    shortest = min((_first_reader(codec.window, layer, length) for layer in codec.layers.values()), default=length)
    if shortest >= length:
        raise ValueError(
            f"no row of a sequence of {length} tokens reads a coded one; use a smaller window or longer text"
        )
    return sequences(texts, tokenizer, length, max_tokens, shortest + 2)


def _measure(
    model: nn.Module,
    codec: Codec,
    pieces: Sequence[Int[Tensor, " _"]],
    coded: tuple[Slot, ...],
    progress: Progress | None,
) -> dict[int, OutputPairs]:
    sums = dict[int, OutputPairs]()

    def listen(seen: Observation) -> None:
        if seen.layer not in codec.layers:
            return
        pairs = _pairs(seen, codec.layers[seen.layer], codec.window, coded)
        sums[seen.layer] = sums[seen.layer] + pairs if seen.layer in sums else pairs

    total = sum(len(piece) for piece in pieces)
    for index, piece in enumerate(pieces):
        with capturing(model, listen) as run:
            run(piece[None], None)
        if progress is not None:
            progress(sum(len(p) for p in pieces[: index + 1]), total)
    return sums


def _pairs(seen: Observation, codec: LayerCodec, window: Window, coded: tuple[Slot, ...]) -> OutputPairs:
    attention = seen.attention
    if attention is None:
        raise ValueError(f"layer {seen.layer}: its output cannot be corrected: {seen.unseen}")
    exact = {"key": seen.key[0], "value": seen.value[0]}
    t, h = exact["key"].shape[1], exact["key"].shape[0]
    n_coded, first = _n_coded(window, codec, t), _first_reader(window, codec, t)
    place = slice(window.sink_tokens, window.sink_tokens + int(n_coded.max()))
    read = {slot: _read(codec, window, slot, seen, place) if slot in coded else x for slot, x in exact.items()}
    total: OutputPairs | None = None
    for rows in torch.arange(first, t, device=seen.key.device).split(ROWS):
        n = torch.arange(t, device=rows.device)
        far = (n >= place.start) & (n < place.start + n_coded[rows.cpu(), None].to(rows.device))
        dense = raw_scores(attention, exact["key"], rows)
        mixed = torch.where(far, raw_scores(attention, read["key"], rows), dense) if "key" in coded else dense
        a, _ = softmax_rows(attention, dense, rows)
        b, _ = softmax_rows(attention, mixed, rows)
        value, moved = exact["value"].float(), (read["value"] - exact["value"]).float()
        plain = _heads(a, value, h)
        other = _heads(b, value, h) + _heads(b * far, moved, h)
        pairs = OutputPairs.of(other, plain)
        total = pairs if total is None else total + pairs
    assert total is not None, "sequences in which no row reads a coded token are not run"
    return total


def _heads(weights: Float[Tensor, "q r t"], value: Float[Tensor, "h t e"], n_kv_heads: int) -> Float[Tensor, "r qe"]:
    """Weighted sums of values, all query heads side by side, as W_O reads them."""
    out = group_of_heads(weights, n_kv_heads) @ value[:, None]  # [h q r e]
    return out.flatten(0, 1).transpose(0, 1).flatten(1)


def _read(codec: LayerCodec, window: Window, slot: Slot, seen: Observation, place: slice) -> Float[Tensor, "h t d"]:
    """Vectors as a cache would give them back: coded in `place`, but for the tokens kept exact by their norm."""
    x = seen.key if slot == "key" else seen.value
    back = x[:1].clone()
    coded = codec.to(x.device).side(slot).distort(x[:1, :, place], seen.positions[:1, place]).to(x)
    if codec.exceptions is not None:
        group = window.group_tokens(codec.granule_tokens)
        kept = codec.exceptions.exact(seen.key[:1, :, place], seen.value[:1, :, place], group).to(x.device)
        coded = torch.where(kept[:, None, :, None], x[:1, :, place], coded)
    back[:, :, place] = coded
    return back[0]


def _n_coded(window: Window, codec: LayerCodec, n_tokens: int) -> Int[Tensor, " t"]:
    """How many coded tokens each row reads: those that had left the window when it came."""
    counts = [window.partition(m, codec.granule_tokens).count(Place.CODED) for m in range(n_tokens)]
    return torch.tensor(counts, device=HOST)


def _first_reader(window: Window, codec: LayerCodec, n_tokens: int) -> int:
    """The first row that reads a coded token; `n_tokens` if none does."""
    counts = _n_coded(window, codec, n_tokens)
    return int((counts > 0).int().argmax()) if bool(counts.any()) else n_tokens
