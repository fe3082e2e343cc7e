"""How a layer's queries read its cache: true attention of a sample of rows, and which key blocks they look at.

a_mn = softmax_n(cap(scale · q_mᵀ k_n) + mask_mn), with the layer's window, sinks and soft cap
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from karhunen.hf.capture import Attention, Observation
from karhunen.hf.output_weights import output_layer
from karhunen.kernels.softmax import attention_weights, capped, causal
from karhunen.statistics.need import Need

ROWS_PER_SEQUENCE = 128
PAIRS_PER_ROW = 32

_GOLDEN = 0.6180339887498949


@final
@dataclass(frozen=True)
class Reading:
    """Attention of sampled rows over all tokens, and whether a row may see a token that counts."""

    attention: Float[Tensor, "q r t"]
    counted: Bool[Tensor, "#q r t"]


def attention_rows(
    seen: Observation, attention: Attention, skip_tokens: int
) -> tuple[Int[Tensor, " r"], Float[Tensor, "q r d"], Reading]:
    """Every n-th row of one sequence (the last one included), its queries, and what they attend to.

    `counted` leaves out the first `skip_tokens`; the softmax runs over them all the same.
    """
    t = seen.key.shape[2]
    step = max(1, -(-(t - skip_tokens) // ROWS_PER_SEQUENCE))
    rows = torch.arange(t - 1, skip_tokens - 1, -step, device=seen.key.device).flip(0)
    weights, visible = softmax_rows(attention, raw_scores(attention, seen.key[0], rows), rows)
    counted = visible.clone()
    counted[..., :skip_tokens] = False
    return rows, attention.query[0][:, rows], Reading(weights, counted)


def raw_scores(attention: Attention, key: Float[Tensor, "h t d"], rows: Int[Tensor, " r"]) -> Float[Tensor, "q r t"]:
    """scale · q_mᵀ k_n of the given rows of one sequence, float32; no mask, no cap."""
    query = group_of_heads(attention.query[0][:, rows].float(), key.shape[0])
    return (query @ key.float()[:, None].mT * attention.scale).flatten(0, 1)


def softmax_rows(
    attention: Attention, scores: Float[Tensor, "q r t"], rows: Int[Tensor, " r"]
) -> tuple[Float[Tensor, "q r t"], Bool[Tensor, "#q r t"]]:
    """a_mn of raw scores: cap, mask, window and sinks are the layer's; and which tokens each row may see."""
    scores = capped(scores, attention.softcap)
    visible = _visible(attention, rows, scores.shape[-1])
    if attention.mask is not None and attention.mask.dtype != torch.bool:
        scores = scores + attention.mask[0][:, rows].float()
    scores = scores.masked_fill(~visible, -torch.inf)
    return attention_weights(scores, None if attention.sinks is None else attention.sinks[:, None]), visible


def block_weights(reading: Reading, need: Need) -> Float[Tensor, "q r blocks"]:
    """Weight of each (row, block): visible keys in it, or their summed sensitivity a(1 − a)."""
    a = reading.attention
    weight = a * (1 - a) * reading.counted if need.weighting == "attention" else reading.counted.float().expand_as(a)
    size = need.block_tokens or a.shape[-1]
    if size == 1:
        return weight
    return nn.functional.pad(weight, (0, -a.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)


def chosen_blocks(
    weights: Float[Tensor, "q r blocks"], first_row: int
) -> tuple[Int[Tensor, "#q #r pairs"], Float[Tensor, "q r pairs"]]:
    """The blocks that stand for each row, and their weights: all, or PAIRS_PER_ROW drawn evenly along their weight.

    Drawn blocks weigh alike and keep the row's total; the draw is fixed, its phase moves from row to row.
    """
    n_blocks = weights.shape[-1]
    if n_blocks <= PAIRS_PER_ROW:
        return torch.arange(n_blocks, device=weights.device)[None, None], weights
    along = weights.double().cumsum(-1)
    total = along[..., -1:]
    phase = (torch.arange(first_row, first_row + weights.shape[1], device=weights.device) * _GOLDEN) % 1
    ticks = (torch.arange(PAIRS_PER_ROW, device=weights.device) + phase[:, None]) / PAIRS_PER_ROW  # [r pairs]
    blocks = torch.searchsorted(along, (ticks * total).contiguous(), right=True).clamp(max=n_blocks - 1)
    return blocks, (total / PAIRS_PER_ROW).expand(-1, -1, PAIRS_PER_ROW)


def group_of_heads(x: Float[Tensor, "q *rest"], n_kv_heads: int) -> Float[Tensor, "h queries *rest"]:
    """Query heads by the KV head they read: consecutive ones share it."""
    return x.unflatten(0, (n_kv_heads, -1))


def output_projection(module: nn.Module, n_inputs: int) -> Float[Tensor, "hidden n"] | None:
    """W_O of an attention module as [outputs, inputs], or None if it has none of that width in plain numbers."""
    found = output_layer(module, n_inputs)
    if found is None:
        return None
    weight = found[0].get_parameter("weight").detach()
    return weight.mT if found[1] else weight


def _visible(attention: Attention, rows: Int[Tensor, " r"], t: int) -> Bool[Tensor, "#q r t"]:
    """Which tokens each row may see: the model's own mask, or causal order and window where it passed none."""
    if attention.mask is not None:
        mask = attention.mask[0][:, rows]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return causal(rows, torch.arange(t, device=rows.device), attention.window_tokens)[None]
