"""How the model's own predictions move with each cached key and value: the gradients behind the Fisher metric.

    y_t ~ p(· | x_≤t) for every t;   g_n = ∂ Σ_t log p(y_t) / ∂ x_n,   through reads of n by tokens `near_tokens` later

Only reads that will meet coded tokens count: not those within the recent window, not those of the sinks. The forward is
the model's own; the backward of attention is worked out here in rows, so that no t × t table outlives its layer.
Layers that read another layer's keys and values (Gemma 3n, Gemma 4) add to the gradients of that layer, whose they are.
Where attention reads what is made of the cache (latent attention), gradients go back to what was cached (expansion.py).
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from karhunen.device import HOST
from karhunen.hf.capture import Attention
from karhunen.hf.checkpointing import checkpointed
from karhunen.hf.expansion import PassingCache, expanded_layers
from karhunen.hf.hooks import before_forward
from karhunen.hf.probe import cache_argument, inference, input_device, layer_devices
from karhunen.hf.queries import showing
from karhunen.kernels.softmax import attention_weights, capped, causal

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
    model: nn.Module,
    tokens: Int[Tensor, " t"],
    seed: int,
    listener: Callable[[int, ReadGradient], None],
    near_tokens: int = NEAR_TOKENS,
) -> None:
    """Show `listener` the gradients of each layer that attends to keys of its own, the last layer first; nothing of
    them is kept here. A layer that others read too has the gradients through all of them.

    One outcome y is drawn per position from a generator with `seed`. The model's weights, modes and hooks are as they
    were afterwards. ValueError where `refuse_gradients` gives a reason.
    """
    refuse_gradients(model)
    head = cast("Any", model).get_output_embeddings()
    cache = PassingCache(model) if expanded_layers(model) else None
    reads = _Reads(listener, near_tokens, cache)
    with inference(model), torch.enable_grad(), _frozen(model), checkpointed(model), reads.routed(model):
        hidden = _hidden_states(model, head, tokens, cache)
        reads.counting = False
        _backward(model, head, hidden, seed)


def refuse_gradients(model: nn.Module) -> None:
    """ValueError for a model without an output embedding to predict with, and for one whose layers share keys and
    values over several devices: a copy does not say whose it is."""
    head: Any = cast("Any", model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no output embedding, so its predictions cannot be differentiated; load the "
            "model with its head (AutoModelForCausalLM), or use a recipe without the Fisher metric, such as nova_kv"
        )
    sharing = any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())
    if sharing and len(devices := set(layer_devices(model).values())) > 1:
        raise ValueError(
            f"layers of {type(model).__name__} read keys and values of others, and lie on {len(devices)} devices; for "
            "the Fisher metric put the model on one, or use a recipe without it"
        )


@final
class _Reads:
    """Attention calls on the way forward, and the gradients of each layer until its last call has had its turn."""

    def __init__(
        self, listener: Callable[[int, ReadGradient], None], near_tokens: int, cache: PassingCache | None
    ) -> None:
        self.listener = listener
        self.cache = cache
        self.near_tokens = near_tokens
        self.counting = True  # a layer that runs once more in the backward pass reads nothing new
        self.n_left: Counter[int] = Counter()
        self.held: dict[int, ReadGradient] = {}
        self.owners: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by a key's identity: the layer that made it

    def routed(self, model: nn.Module) -> AbstractContextManager[None]:
        """The model's attention goes past here."""
        return showing(model, self.attend)

    def attend(self, attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        """One attention call."""
        index = int(getattr(attention.module, "layer_idx", -1))
        layer = self._owner(key, index)
        self.n_left[layer] += self.counting
        cached, expansion = (key, value), None
        if self.cache is not None:
            cached, expansion = self.cache.read_by(index, key, value)
        reach = _Reach(
            layer, attention.scale, attention.mask, attention.window_tokens, attention.softcap, attention.sinks, self,
            None if expansion is None else expansion.back,
        )  # fmt: skip
        # what depends on nothing that is differentiated would have no backward pass
        anchor = torch.zeros((), device=key.device, requires_grad=True)
        return _FarReads.apply(attention.query, key, value, *(x.detach() for x in cached), anchor, reach, plain), None

    def _owner(self, key: Tensor, reader: int) -> int:
        """The layer that attended to `key` first, which made it. The key is not kept alive."""
        known = self.owners.get(id(key))
        if known is None or known[0]() is not key:
            known = self.owners[id(key)] = weakref.ref(key), reader
        return known[1]

    def add(self, layer: int, new: ReadGradient) -> None:
        """Gradients through one call; with the layer's last one they are whole."""
        if (known := self.held.pop(layer, None)) is not None:  # a second reader of one cache adds to the same gradients
            new = ReadGradient(known.by_key + new.by_key, known.by_value + new.by_value, new.key, new.value)
        self.n_left[layer] -= 1
        if self.n_left[layer]:
            self.held[layer] = new
        else:
            self.listener(layer, new)


@final
@dataclass(frozen=True)
class _Reach:
    """What the backward pass has to know of one attention call: which tokens it reached, and how strongly.

    The call's own vectors are not here: they would be kept for every layer.
    """

    layer: int
    scale: float
    mask: Tensor | None
    window_tokens: int | None
    softcap: float | None
    sinks: Tensor | None
    reads: _Reads
    back: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]] | None
    """From gradients by what is read to those by what was cached, where these differ."""


class _FarReads(torch.autograd.Function):
    """Attention as the model computes it; its backward also shows the gradients through far reads alone."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cached_key: Tensor, cached_value: Tensor,
        anchor: Tensor, reach: _Reach, plain: Callable[[], Any],
    ) -> Tensor:  # fmt: skip
        out = plain()[0]
        ctx.save_for_backward(query, key, value, cached_key, cached_value, out)
        ctx.reach = reach
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, cached_key, cached_value, out = ctx.saved_tensors
        reach: _Reach = ctx.reach
        near_tokens = reach.reads.near_tokens
        (b, n_q, t, _), h = query.shape, key.shape[1]
        d_query, d_key, d_value, near_key, near_value = (
            torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value, key, value)
        )
        for row in range(b):
            for g in range(h):
                heads = slice(g * n_q // h, (g + 1) * n_q // h)
                k, v = key[row, g].float(), value[row, g].float()
                for start in range(0, t, ROWS):
                    stop = min(start + ROWS, t)
                    q = query[row, heads, start:stop].float()  # [q r d]
                    d = d_out[row, start:stop, heads].transpose(0, 1).float()
                    o = out[row, start:stop, heads].transpose(0, 1).float()
                    p, d_score = _softmax_rows(reach, q, k[:stop], v[:stop], d, o, row, heads, start)
                    d_query[row, heads, start:stop] = d_score @ k[:stop]
                    d_key[row, g, :stop] += _columns(d_score, q)
                    d_value[row, g, :stop] += _columns(p, d)
                    band = slice(max(0, start - near_tokens + 1), stop)
                    near = _near(start, stop, band.start, near_tokens, q.device)
                    near_key[row, g, band] += _columns(d_score[..., band] * near, q)
                    near_value[row, g, band] += _columns(p[..., band] * near, d)
        far_key, far_value = torch.sub(d_key, near_key, out=near_key), torch.sub(d_value, near_value, out=near_value)
        far_key[:, :, :SINK_TOKENS] = far_value[:, :, :SINK_TOKENS] = 0
        by_key, by_value = (far_key, far_value) if reach.back is None else reach.back(far_key, far_value)
        if by_key is None or by_value is None:
            raise ValueError(f"layer {reach.layer}: its attention reads only a part of what it caches")
        reach.reads.add(reach.layer, ReadGradient(by_key, by_value, cached_key.detach(), cached_value.detach()))
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), *[None] * 5


def _softmax_rows(
    attention: _Reach, q: Tensor, k: Tensor, v: Tensor, d: Tensor, o: Tensor, row: int, heads: slice, start: int
) -> tuple[Float[Tensor, "q r n"], Float[Tensor, "q r n"]]:
    """Attention weights of some rows and the gradient of their scores before scaling, masks and caps undone."""
    stop = k.shape[0]
    under_cap = score = capped(q @ k.T * attention.scale, attention.softcap)
    if attention.mask is not None:
        mask = attention.mask[row, :, start : start + q.shape[1], :stop]
        mask = mask if mask.shape[0] == 1 else mask[heads]
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask.float()
    else:
        every = torch.arange(max(stop, start + q.shape[1]), device=q.device)
        rows = every[start : start + q.shape[1]]
        score = score.masked_fill(~causal(rows, every[:stop], attention.window_tokens), -torch.inf)
    p = attention_weights(score, None if attention.sinks is None else attention.sinks[heads][:, None])
    d_score = p * (d @ v.T - (d * o).sum(-1, keepdim=True))
    if attention.softcap is not None:
        d_score = d_score * (1 - (under_cap / attention.softcap).square())
    return p, d_score * attention.scale


def _columns(table: Float[Tensor, "q r n"], rows: Float[Tensor, "q r d"]) -> Float[Tensor, "n d"]:
    """Σ over queries and rows of the outer products."""
    return table.flatten(0, 1).T @ rows.flatten(0, 1)


def _near(start: int, stop: int, first_key: int, near_tokens: int, device: torch.device) -> Tensor:
    age = torch.arange(start, stop, device=device)[:, None] - torch.arange(first_key, stop, device=device)
    return age < near_tokens


def _hidden_states(
    model: nn.Module, head: nn.Module, tokens: Int[Tensor, " t"], cache: PassingCache | None = None
) -> Float[Tensor, "1 t w"]:
    """What the output embedding is given, with its graph; the embedding itself sees one position only."""
    seen: list[Tensor] = []
    mine = get_ident()  # another thread's forward keeps all its positions

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if get_ident() != mine:
            return None
        seen.append(args[0])
        return (args[0][:, -1:].detach(),), kwargs

    remove = before_forward(head, keep)
    try:
        given = {"use_cache": False} if cache is None else {"use_cache": True, cache_argument(model): cache}
        cast("Any", model)(input_ids=tokens[None].to(input_device(model)), **given)
    finally:
        remove()
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
