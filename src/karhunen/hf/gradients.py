"""How the model's own predictions move with each cached key and value: the gradients behind the Fisher metric.

    y_t ~ p(· | x_≤t) for every t;   g_n = ∂ Σ_t log p(y_t) / ∂ x_n,   through reads of n by tokens `near_tokens` later

Only reads that will meet coded tokens count: not those within the recent window, not those of the sinks. The forward is
the model's own; the backward of attention is worked out here in rows, so that no t × t table outlives its layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from karhunen.device import HOST
from karhunen.hf.capture import Attention, routed_attention
from karhunen.hf.probe import inference

NEAR_TOKENS = 128
SINK_TOKENS = 4
ROWS = 256  # query rows worked out at a time in the backward pass
HEAD_TOKENS = 256  # positions whose logits exist at a time


@final
@dataclass(frozen=True)
class ReadGradient:
    """Gradients by the cached vectors of one layer, and the vectors themselves."""

    by_key: Float[Tensor, "1 h t d"]
    by_value: Float[Tensor, "1 h t e"]
    key: Float[Tensor, "1 h t d"]
    value: Float[Tensor, "1 h t e"]


def read_gradients(
    model: nn.Module, tokens: Int[Tensor, " t"], seed: int, near_tokens: int = NEAR_TOKENS
) -> dict[int, ReadGradient]:
    """Gradients by keys (after RoPE, as cached) and by values of each layer that attends, float32.

    One outcome y is drawn per position from a generator with `seed`. The model's weights, modes and hooks are as they
    were afterwards. ValueError if the model has no output embedding to predict with.
    """
    head = cast("Any", model).get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding, so its predictions cannot be differentiated")
    leaves: dict[int, tuple[Tensor, Tensor]] = {}
    vectors: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(attention: Attention, key: Tensor, value: Tensor, plain: Any) -> Any:
        layer = int(getattr(attention.module, "layer_idx", -1))
        if layer in leaves:  # a second reader of one cache adds to the same gradients
            moved = leaves[layer]
        else:
            moved = leaves[layer] = (_leaf(key), _leaf(value))
            vectors[layer] = (key.detach(), value.detach())
        read = _Read(attention, near_tokens, plain)
        return _FarReads.apply(attention.query, key, value, *moved, read), None

    with inference(model), torch.enable_grad(), _frozen(model), routed_attention(model, attend):
        hidden = _hidden_states(model, head, tokens)
        _backward(model, head, hidden, seed)
    return {
        layer: ReadGradient(key.grad, cast("Tensor", value.grad), *vectors[layer])
        for layer, (key, value) in sorted(leaves.items())
        if key.grad is not None
    }


@final
@dataclass(frozen=True)
class _Read:
    """What the backward pass has to know of one attention call."""

    attention: Attention
    near_tokens: int
    plain: Any


class _FarReads(torch.autograd.Function):
    """Attention as the model computes it; its backward also gives the gradients through far reads alone."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, far_k: Tensor, far_v: Tensor, read: _Read
    ) -> Tensor:
        out = read.plain()[0]
        ctx.save_for_backward(query, key, value, out)
        ctx.read = read
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out = ctx.saved_tensors
        (b, n_q, t, _), h = query.shape, key.shape[1]
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value, key, value)]
        d_query, d_key, d_value, far_key, far_value = grads
        near_key, near_value = torch.zeros_like(far_key), torch.zeros_like(far_value)
        for row in range(b):
            for g in range(h):
                heads = slice(g * n_q // h, (g + 1) * n_q // h)
                k, v = key[row, g].float(), value[row, g].float()
                for start in range(0, t, ROWS):
                    stop = min(start + ROWS, t)
                    q = query[row, heads, start:stop].float()  # [q r d]
                    d = d_out[row, start:stop, heads].transpose(0, 1).float()
                    o = out[row, start:stop, heads].transpose(0, 1).float()
                    p, d_score = _softmax_rows(ctx.read.attention, q, k[:stop], v[:stop], d, o, row, heads, start)
                    d_query[row, heads, start:stop] = d_score @ k[:stop]
                    d_key[row, g, :stop] += _columns(d_score, q)
                    d_value[row, g, :stop] += _columns(p, d)
                    band = slice(max(0, start - ctx.read.near_tokens + 1), stop)
                    near = _near(start, stop, band.start, ctx.read.near_tokens, q.device)
                    near_key[row, g, band] += _columns(d_score[..., band] * near, q)
                    near_value[row, g, band] += _columns(p[..., band] * near, d)
        far_key.copy_(d_key - near_key)
        far_value.copy_(d_value - near_value)
        far_key[:, :, :SINK_TOKENS] = far_value[:, :, :SINK_TOKENS] = 0
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), far_key, far_value, None


def _softmax_rows(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, d: Tensor, o: Tensor, row: int, heads: slice, start: int
) -> tuple[Float[Tensor, "q r n"], Float[Tensor, "q r n"]]:
    """Attention weights of some rows and the gradient of their scores before scaling, masks and caps undone."""
    stop = k.shape[0]
    score = q @ k.T * attention.scale
    if attention.softcap is not None:
        score = attention.softcap * (score / attention.softcap).tanh()
    capped = score
    if attention.mask is not None:
        mask = attention.mask[row, :, start : start + q.shape[1], :stop]
        mask = mask if mask.shape[0] == 1 else mask[heads]
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask.float()
    else:
        at = torch.arange(start, start + q.shape[1], device=q.device)[:, None]
        age = at - torch.arange(stop, device=q.device)
        hidden = age < 0
        if attention.window_tokens is not None:
            hidden = hidden | (age >= attention.window_tokens)
        score = score.masked_fill(hidden, -torch.inf)
    if attention.sinks is not None:
        sink = attention.sinks.float()[heads][:, None, None].expand(-1, q.shape[1], 1)
        p = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    else:
        p = score.softmax(-1)
    d_score = p * (d @ v.T - (d * o).sum(-1, keepdim=True))
    if attention.softcap is not None:
        d_score = d_score * (1 - (capped / attention.softcap).square())
    return p, d_score * attention.scale


def _columns(table: Float[Tensor, "q r n"], rows: Float[Tensor, "q r d"]) -> Float[Tensor, "n d"]:
    """Σ over queries and rows of the outer products."""
    return table.flatten(0, 1).T @ rows.flatten(0, 1)


def _near(start: int, stop: int, first_key: int, near_tokens: int, device: torch.device) -> Tensor:
    age = torch.arange(start, stop, device=device)[:, None] - torch.arange(first_key, stop, device=device)
    return age < near_tokens


def _leaf(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device, requires_grad=True)


def _hidden_states(model: nn.Module, head: nn.Module, tokens: Int[Tensor, " t"]) -> Float[Tensor, "1 t w"]:
    """What the output embedding is given, with its graph; the embedding itself sees one position only."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0])
        return (args[0][:, -1:].detach(),)

    handle = head.register_forward_pre_hook(keep)
    try:
        cast("Any", model)(input_ids=tokens[None].to(next(model.parameters()).device), use_cache=False)
    finally:
        handle.remove()
    return seen[0]


def _backward(model: nn.Module, head: nn.Module, hidden: Float[Tensor, "1 t w"], seed: int) -> None:
    generator = torch.Generator(HOST).manual_seed(seed)
    config: Any = cast("Any", model).config.get_text_config(decoder=True)
    cap = getattr(config, "final_logit_softcapping", None)
    at_head = hidden.detach().requires_grad_(True)
    for part in at_head.split(HEAD_TOKENS, dim=1):
        logits = head(part)[0].float()
        logits = cap * (logits / cap).tanh() if cap else logits
        drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator).to(logits.device)
        (-logits.log_softmax(-1).gather(-1, drawn).sum()).backward()
    hidden.backward(at_head.grad)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
