"""`attn_implementation="karhunen"`: coded history is read from its bytes, everything else goes to the plain attention.

    karhunen.enable(model)                       # until model.set_attn_implementation("sdpa")

No import makes the name known to transformers. `register` does, and so does the first use of `enable`, `compressed` or
`CompressedCache`; from then on `model.set_attn_implementation("karhunen")` finds it too. A model is loaded with it
(`from_pretrained(..., attn_implementation="karhunen")`) after `register`.

With an ordinary cache, in prefill and in layers that are not coded this is `sdpa`; `eager` where the layer has what
sdpa cannot do (soft-capped scores, learned sinks). What bytes cannot serve is decoded, and the cache's report says why.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from karhunen.attention import fused
from karhunen.hf.byte_reads import read_bytes
from karhunen.hf.capture import can_be_routed, own_attention
from karhunen.hf.history import HistoryTensor
from karhunen.hf.implementation import borrow
from karhunen.hf.in_graph import Handed
from karhunen.hf.probe import text_config, untraced
from karhunen.windows.score import Queries

NAME = "karhunen"


def register() -> None:
    """Make the name known to transformers; doing it again changes nothing."""
    AttentionInterface.register(NAME, karhunen_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def enable(model: nn.Module) -> None:
    """From now on the model's attention reads a compressed cache from its bytes. Other caches are attended to as by
    sdpa; `model.set_attn_implementation("sdpa")` is the way back. ValueError if the model has an attention of its own
    that transformers cannot exchange: its caches are decoded for it, inside `karhunen.compressed` too."""
    if not can_be_routed(model):
        raise ValueError(
            f"the attention of {type(model).__name__} cannot be exchanged, so it cannot read bytes; a CompressedCache "
            "works with it as it is, and hands it decoded keys and values"
        )
    register()
    cast("PreTrainedModel", model).set_attn_implementation(NAME)


@contextmanager
def reading_bytes(model: nn.Module) -> Iterator[None]:
    """This attention for the duration, where the model's own is sdpa; any other was chosen, and stays."""
    if not can_be_routed(model) or getattr(text_config(model), "_attn_implementation", None) != "sdpa":
        yield
        return
    register()
    give_back = borrow(model, NAME)
    try:
        yield
    finally:
        give_back()


def karhunen_attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, as transformers calls it: (output [b m q e], weights or None)."""
    if isinstance(key, Handed):
        return _handed(module, query, key, attention_mask, arguments)
    if not torch.compiler.is_compiling():
        return _attention(module, query, key, value, attention_mask, arguments)
    if _is_plain(module, key, arguments):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    return _in_python(module, query, key, value, attention_mask, arguments)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Where nothing is compiled."""
    if isinstance(key, HistoryTensor) and isinstance(value, HistoryTensor):
        reason = _refusal(module, query, key, value, attention_mask, arguments)
        if key.history.on_query is not None:
            key.history.on_query(query.detach(), _scale(query, arguments))
        if not reason:
            settings = (_sinks(module, arguments), _scale(query, arguments), arguments.get("softcap"))
            try:
                return read_bytes(key.history, query.detach(), attention_mask, *settings), None
            except fused.NotReadableError as refused:
                reason = refused.reason
        history = key.history
        key, value = key.dense(reason), value.dense(reason)
        if history.on_attended is not None:
            asked = Queries(
                query.detach(), _scale(query, arguments), arguments.get("softcap"), _sinks(module, arguments)
            )
            history.on_attended(asked, attention_mask, None)
    return _plain(module, query, key, value, attention_mask, arguments)


def _handed(
    module: nn.Module, query: Tensor, handed: Handed, mask: Tensor | None, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """In a compiled forward: an operator that knows the layer, or Python where it cannot serve this call."""
    layer = handed.layer
    if _refused_call(module, arguments) or (mask is not None and mask.ndim != 4):
        return _in_python(module, query, handed, handed, mask, arguments)
    out = torch.ops.karhunen.attend(
        layer.graph.handle, query, mask, _sinks(module, arguments), _scale(query, arguments), arguments.get("softcap"),
        handed.n_values,
    )  # fmt: skip
    return out, None


@untraced
def _in_python(module: nn.Module, query: Tensor, key: Any, value: Any, mask: Any, arguments: Any) -> Any:
    """The graph breaks here."""
    if isinstance(key, Handed):
        key, value = key.layer.graph.taken()
    return _attention(module, query, key, value, mask, arguments)


def _is_plain(module: nn.Module, key: Any, arguments: dict[str, Any]) -> bool:
    """Whether a traced call is sdpa's of transformers."""
    asks_more = arguments.get("softcap") is not None or _sinks(module, arguments) is not None
    return type(key) is Tensor and not asks_more and _computes_sdpa(type(module))


def _refusal(
    module: nn.Module, query: Tensor, key: HistoryTensor, value: HistoryTensor, mask: Any, arguments: dict[str, Any]
) -> str:
    """Why this call is served from decoded tokens; empty if bytes do."""
    if key.history is not value.history or (key.slot, value.slot) != ("key", "value"):
        return "keys and values do not come from one cache layer"
    if query.requires_grad:
        return "gradients pass through attention"
    if reason := _refused_call(module, arguments):
        return reason
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] != key.shape[-2]):
        return f"the mask {tuple(getattr(mask, 'shape', ()))} does not cover the {key.shape[-2]} tokens held"
    return ""


def _refused_call(module: nn.Module, arguments: dict[str, Any]) -> str:
    """What of the call's own settings bytes do not serve."""
    if arguments.get("dropout") and module.training:
        return "attention drops out weights"
    if arguments.get("output_attentions"):
        return "the weights themselves are asked for"
    if arguments.get("position_bias") is not None:
        return "the model adds a bias of its own to the scores"
    if arguments.get("sliding_window") is not None:
        return "the layer sees a sliding window"
    if not (getattr(module, "is_causal", True) if arguments.get("is_causal") is None else arguments["is_causal"]):
        return "the layer is not causal"
    return ""


def _scale(query: Tensor, arguments: dict[str, Any]) -> float:
    scale = arguments.get("scaling")
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _sinks(module: nn.Module, arguments: dict[str, Any]) -> Tensor | None:
    found = arguments.get("s_aux")
    found = getattr(module, "sinks", None) if found is None else found
    return found.detach() if isinstance(found, Tensor) else None


def _plain(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """transformers' own: sdpa, or the eager attention of the module's file."""
    asks_more = arguments.get("softcap") is not None or _sinks(module, arguments) is not None
    if not asks_more and _has_sdpa(type(module)):
        return own_attention(module, "sdpa")(module, query, key, value, mask, **arguments)
    return own_attention(module, "eager")(module, query, key, value, _added(mask, query, key, module), **arguments)


@cache
def _has_sdpa(kind: type[nn.Module]) -> bool:
    """Whether the models of the module's file say that sdpa computes their attention."""
    names = vars(sys.modules.get(kind.__module__, object))
    models = [x for x in names.values() if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    mine = [x for x in models if x.__module__ == kind.__module__]
    return all(cast("Any", x)._supports_sdpa for x in mine)


@torch.compiler.assume_constant_result
def _computes_sdpa(kind: type[nn.Module]) -> bool:
    """As above, to a tracer."""
    return _has_sdpa(kind)


def _added(mask: Any, query: Tensor, key: Tensor, module: nn.Module) -> Any:
    """A mask as eager attention wants it: added to the scores. None stands for causal, as sdpa takes it."""
    m, n = query.shape[2], key.shape[2]
    if mask is None and m > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(m, n, dtype=torch.bool, device=query.device).tril(n - m)[None, None]
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, least)
    return mask
