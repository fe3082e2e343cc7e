"""Attention to what a layer's update gave: read from its bytes, or decoded where those cannot be read."""

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.attention import fused
from karhunen.hf.history import History, HistoryTensor
from karhunen.kernels.softmax import Partial, attended, capped, with_sinks
from karhunen.windows.score import Queries


def read_bytes(
    history: History,
    query: Float[Tensor, "b q m d"],
    mask: Tensor | None,
    sinks: Float[Tensor, " q"] | None,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "b m q e"]:
    """Attention from the bytes of a layer; fused.NotReadableError, with the reason, where they do not serve."""
    told: list[Tensor] = []
    out = fused.attend(
        history.reader, history.snapshot, query, scale=scale, softcap=softcap, mask=mask, sinks=sinks,
        over_coded=history.over_coded(mask), on_log_sum=told.append if history.on_attended else None,
    )  # fmt: skip
    history.on_read(history.reader.description)
    if history.on_attended is not None:
        history.on_attended(Queries(query, scale, softcap, sinks), mask, told[0])
    return out.transpose(1, 2).contiguous()


def attention_to(
    given: tuple[Tensor, Tensor],
    query: Float[Tensor, "b q m d"],
    mask: Tensor | None,
    sinks: Float[Tensor, " q"] | None,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "b m q e"]:
    """Attention of a compiled forward to the keys and values that a layer gave; decoded where bytes cannot be read
    under this mask, and the cache's report says why."""
    key, value = given
    if isinstance(key, HistoryTensor) and isinstance(value, HistoryTensor):
        try:
            return read_bytes(key.history, query, mask, sinks, scale, softcap)
        except fused.NotReadableError as refused:
            history = key.history
            key, value = key.dense(refused.reason), value.dense(refused.reason)
            if history.on_attended is not None:
                history.on_attended(Queries(query, scale, softcap, sinks), mask, None)
    return _to_decoded(query, key, value, mask, sinks, scale, softcap).transpose(1, 2).contiguous()


def _to_decoded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float,
    softcap: float | None,
) -> Float[Tensor, "b q m e"]:  # fmt: skip
    """In float32; without a mask a token sees all before it. Padding, a row that sees nothing, stays finite."""
    h, m, n = key.shape[1], query.shape[2], key.shape[2]
    scores = capped(query.float().unflatten(1, (h, -1)) @ key[:, :, None].float().mT * scale, softcap)  # [b h q m n]
    if mask is None:
        mask = torch.ones(1, 1, m, n, dtype=torch.bool, device=query.device).tril(n - m)
    over = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (h, -1))
    scores = scores.masked_fill(~over, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + over
    part = attended(scores, value[:, :, None].float())
    heads = Partial(part.mean.flatten(1, 2), part.log_sum.flatten(1, 2))
    return with_sinks(heads, None if sinks is None else sinks[:, None]).mean.to(query.dtype)
