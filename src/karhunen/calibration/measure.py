"""One layer's observation becomes the statistic that was asked for.

Padding counts nowhere, nor do the first `skip_tokens` of a sequence. Each sequence is measured by itself and the
results add up, so a padded batch measures what its sequences measure alone.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.calibration.projections import hidden_states, measure_projection
from karhunen.calibration.reading import (
    PAIRS_PER_ROW,
    attention_rows,
    block_weights,
    chosen_blocks,
    group_of_heads,
    output_projection,
    raw_scores,
)
from karhunen.device import HOST
from karhunen.frames.rope_frame import RopeFrame, join_heads
from karhunen.hf.capture import Attention, Observation
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need, Statistic
from karhunen.statistics.rotary import Rotary
from karhunen.statistics.samples import Samples
from karhunen.windows.small_norm import token_norms

# Elements of the largest temporary while queries are turned into the frames of the blocks they read.
CHUNK_ELEMENTS = 1 << 22


def measure(need: Need, seen: Observation, rotary: Rotary | None) -> Statistic:
    """The statistic `need` of one observation; `rotary` is that of the slot the need is about.

    ValueError where the layer's queries were not seen, naming the layer and the reason.
    """
    if need.kind == "output_gram":
        return _output_gram(need, seen)
    if need.kind == "projection":
        return measure_projection(need, seen, _attention_of(need, seen), rotary)
    parts = [_measure_sequence(need, _sequence(seen, row), rotary) for row in range(seen.key.shape[0])]
    total = parts[0]
    for part in parts[1:]:
        total = total + part  # type: ignore[operator]  # equal needs give equal kinds
    return total


def _sequence(seen: Observation, row: int) -> Observation:
    """One sequence without its padding, batch of one."""
    valid = seen.valid[row]
    where = slice(None) if bool(valid.all()) else valid.nonzero()[:, 0]
    attention = seen.attention
    if attention is not None:
        mask, hidden = attention.mask, attention.hidden
        attention = replace(
            attention,
            query=attention.query[row : row + 1, :, where],
            mask=None if mask is None else mask[row : row + 1, :, where][..., where],
            hidden=None if hidden is None else hidden[row : row + 1, where],
        )
    return Observation(
        seen.layer,
        seen.key[row : row + 1, :, where],
        seen.value[row : row + 1, :, where],
        seen.positions[row : row + 1, where],
        seen.valid[row : row + 1, where],
        attention,
        seen.unseen,
    )


def _measure_sequence(need: Need, seen: Observation, rotary: Rotary | None) -> Statistic:
    if need.kind == "queries":
        return _queries(need, seen, rotary)
    if need.kind == "outputs":
        return _outputs(need, seen)
    raw = seen.key if need.slot == "key" else seen.value
    frame = RopeFrame(need.block_tokens, need.joined)
    keep = counted(need, seen.key, seen.value)
    if need.kind == "activations":
        return Moments.of(hidden_states(need, seen, _attention_of(need, seen))[:, keep])
    x = frame.forward(raw, seen.positions, rotary)[0][:, keep]  # [g t e]
    if need.kind == "samples":
        return Samples.of(x, need.stride, seen.positions[0, keep])
    if need.kind == "moments":
        return Moments.of(x)
    received = _attention_received(need, seen)
    received = received[:, keep]
    return Moments.of(x, received.mean(0, keepdim=True) if need.joined else received)


def counted(need: Need, key: Float[Tensor, "1 h t d"], value: Float[Tensor, "1 h t e"]) -> Int[Tensor, " kept"]:
    """Indices of the tokens of a sequence that `need` counts: past the skipped ones, and not of very small norm."""
    index = torch.arange(need.skip_tokens, key.shape[2], device=key.device)
    if need.quiet_slot is None:
        return index
    norms = token_norms(key if need.quiet_slot == "key" else value)[0, index]
    return index[norms >= need.quiet_fraction * norms.median()]


def _queries(need: Need, seen: Observation, rotary: Rotary | None) -> Moments:
    """Weighted moments of R(−n₀) q_m over sampled rows m and the key blocks n₀ they see: float32, summed in float64.

    Rows that see more than PAIRS_PER_ROW blocks count that many of them, drawn evenly from their total weight.
    """
    attention, frame = _attention_of(need, seen), RopeFrame(need.block_tokens)
    h, d = seen.key.shape[1], seen.key.shape[-1]
    rows, query, received = attention_rows(seen, attention, need.skip_tokens)
    starts = frame.starts(seen.positions[0]).unique_consecutive()
    weights = block_weights(received, need)  # [q rows blocks]
    total = _zero_moments(h, d)
    step = max(1, CHUNK_ELEMENTS // max(1, query.shape[0] * min(len(starts), PAIRS_PER_ROW) * d))
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        total = total + _turned_moments(query[:, part] * attention.scale, weights[:, part], starts, rotary, h, first)
    return _placed_on_diagonal(total) if need.joined else total


def _turned_moments(
    query: Float[Tensor, "q r d"],
    weights: Float[Tensor, "q r blocks"],
    starts: Int[Tensor, " blocks"],
    rotary: Rotary | None,
    n_kv_heads: int,
    first_row: int,
) -> Moments:
    blocks, weight = chosen_blocks(weights, first_row)  # [q r pairs], or [1 1 pairs] where all are taken
    x = query.float()[:, :, None].expand(-1, -1, blocks.shape[-1], -1)
    if rotary is not None and bool(starts.any()):
        x = rotary.rotate(x, -starts[blocks]).float()
    x = group_of_heads(x, n_kv_heads).flatten(1, 3)  # [h (queries · rows · pairs) d]
    weight = group_of_heads(weight.float(), n_kv_heads).flatten(1, 3)
    weighted = x * weight[..., None]
    return Moments(weight.double().sum(-1), weighted.double().sum(-2), (weighted.mT @ x).double())


def _attention_received(need: Need, seen: Observation) -> Float[Tensor, "h t"]:
    """Σ_m a_mn² over sampled rows m and the group's query heads, per row, of each token; or of raw scores."""
    attention = _attention_of(need, seen)
    rows, _, received = attention_rows(seen, attention, need.skip_tokens)
    weights = raw_scores(attention, seen.key[0], rows) if need.weighting == "scores" else received.attention
    squared = weights.square().sum(1) / max(1, len(rows))  # [q t]
    return group_of_heads(squared, seen.key.shape[1]).sum(1)


def _outputs(need: Need, seen: Observation) -> Moments:
    """Moments of Σ_n a_mn v_n over sampled rows m and the group's query heads."""
    attention = _attention_of(need, seen)
    _, _, received = attention_rows(seen, attention, need.skip_tokens)
    outputs = group_of_heads(received.attention, seen.key.shape[1]) @ seen.value[0].float()[:, None]  # [h q r e]
    heads = Moments.of(outputs.flatten(1, 2))
    return _placed_on_diagonal(heads) if need.joined else heads


def _output_gram(need: Need, seen: Observation) -> Moments:
    attention = _attention_of(need, seen)
    h, e = seen.value.shape[1], seen.value.shape[-1]
    n_query_heads = attention.query.shape[1]
    weight = output_projection(attention.module, n_query_heads * e)  # [hidden q·e]
    if weight is None:
        raise ValueError(
            f"layer {seen.layer}: {need} needs the output projection of {type(attention.module).__name__}, "
            "which has none that reads its heads as plain numbers; use a recipe with a plain metric for values"
        )
    per_head = weight.double().unflatten(1, (n_query_heads, e)).permute(1, 2, 0)  # [q e hidden]
    outer = group_of_heads(per_head @ per_head.mT, h).sum(1)
    one = torch.ones(h, dtype=torch.float64, device=outer.device)
    gram = Moments(one, torch.zeros(h, e, dtype=torch.float64, device=outer.device), outer)
    return _placed_on_diagonal(gram) if need.joined else gram


def _attention_of(need: Need, seen: Observation) -> Attention:
    if seen.attention is None:
        raise ValueError(
            f"layer {seen.layer}: {need} cannot be measured: {seen.unseen}; use a recipe with a plain metric"
        )
    return seen.attention


def _zero_moments(g: int, d: int) -> Moments:
    zero = torch.zeros(g, d, d, dtype=torch.float64, device=HOST)
    return Moments(zero[:, 0, 0], zero[:, 0], zero)


def _placed_on_diagonal(heads: Moments) -> Moments:
    """Per-head moments as those of the heads side by side; what heads say of each other is left at zero."""
    return Moments(heads.count.mean(0, True), join_heads(heads.sum[:, None])[0], torch.block_diag(*heads.outer)[None])
