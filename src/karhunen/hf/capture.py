"""What passes through a model's attention: what each layer puts into its cache, and the queries that will read it.

    with capturing(model, listener) as run:
        run(input_ids, attention_mask)          # listener(Observation) once for each caching layer, in layer order

Keys and values are recorded where the cache receives them, so they are what the cache stores in every model; queries
where the model calls attention (`hf.queries`), by forwards of this thread alone. Where attention does not see the
cached keys (latent attention expands them) an observation has no query, and says why. Layers that read what another one
has cached (Gemma 3n, Gemma 4) are shown to a second listener, under the owner's number.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from karhunen.device import HOST
from karhunen.hf.hooks import before_forward
from karhunen.hf.probe import RecordingCache, forward, inference, parameters, text_config

SHOWN = "karhunen_shown_"  # with the name of a plain implementation behind it: that one, looked on by `hf.queries`


@final
@dataclass(frozen=True)
class Attention:
    """How one layer reads its cache: queries after RoPE, the softmax's scale, and all else that shapes it.

    `mask` is the one the model passed: additive or boolean [b 1 t n], or None for plain causal attention. `hidden` is
    what the layer's projections read, where `capturing` saw it.
    """

    module: nn.Module
    query: Float[Tensor, "b q t d"]
    scale: float
    mask: Shaped[Tensor, "b #q t n"] | None = None
    window_tokens: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " q"] | None = None
    hidden: Float[Tensor, "b t hidden"] | None = None


@final
@dataclass(frozen=True)
class Observation:
    """One layer in one forward without history. `valid` is False for padding, `positions` count valid tokens.

    `attention` is None where it was not seen or does not read the cached keys; `unseen` says why.
    """

    layer: int
    key: Float[Tensor, "b h t d"]
    value: Float[Tensor, "b g t e"]
    positions: Int[Tensor, "b t"]
    valid: Bool[Tensor, "b t"]
    attention: Attention | None = None
    unseen: str = ""
    reader: int | None = None
    """The layer that reads here, where it is not the one that caches."""


Listener = Callable[[Observation], None]
Run = Callable[[Int[Tensor, "b t"], Int[Tensor, "b t"] | None], None]


@contextmanager
def capturing(model: nn.Module, listener: Listener, on_reader: Listener | None = None) -> Iterator[Run]:
    """Show `listener` what every layer caches and how it reads that, in the forwards that the yielded function runs;
    `on_reader` each further layer's reads of the same keys and values, after those of the layer that cached them.

    The model is put back exactly as it was, also after an error: attention implementation, modes, hooks.
    """
    recorder = _Recorder(model, listener, on_reader)
    with inference(model), _inputs_kept(model, recorder.inputs), _attention_function(model, recorder.attend):
        yield recorder.run


@final
class _Recorder:
    """Pairs what a layer cached with the attention that follows it, one layer at a time."""

    def __init__(self, model: nn.Module, listener: Listener, on_reader: Listener | None) -> None:
        self.model = model
        self.listener = listener
        self.on_reader = on_reader
        self.owners: dict[int, tuple[Tensor, Tensor]] = {}  # the newest token's key and value, by caching layer
        self.pending: tuple[int, Tensor, Tensor] | None = None
        self.inputs: dict[nn.Module, Tensor] = {}
        self.positions = self.valid = torch.empty(0, device=HOST)

    def run(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> None:
        """One forward; padding (zeros of the mask) may stand on either side."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.valid = mask.bool()
        self.owners.clear()
        self.positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        arguments: dict[str, Any] = {} if self.valid.all() else {"attention_mask": mask}
        if "position_ids" in parameters(self.model):
            arguments["position_ids"] = self.positions
        head = _headless(self.model)
        if self.on_reader is not None and "logits_to_keep" in parameters(head) and _shares(head):
            # as a number it would leave all queries but the last out of the layers that only read (Gemma 4)
            arguments["logits_to_keep"] = torch.tensor([mask.shape[1] - 1], device=HOST)
        forward(head, RecordingCache(self.model, self.cached), input_ids, **arguments)
        self._flush(None, "its attention does not go through transformers' attention interface")

    def cached(self, layer: int, key: Tensor, value: Tensor) -> None:
        """A layer hands new keys and values to the cache."""
        self._flush(None, "its attention does not go through transformers' attention interface")
        self.pending = layer, key, value

    def attend(self, attention: Attention, key: Tensor, value: Tensor) -> None:
        """A layer attends to `key` and `value`."""
        index = getattr(attention.module, "layer_idx", None)
        if self.pending is None or self.pending[0] != index:
            self._read_again(index, attention, key, value)
            self.inputs.clear()
            return
        if self.on_reader is not None:
            self.owners[self.pending[0]] = key[:, :, -1].clone(), value[:, :, -1].clone()
        read = zip((key, value), self.pending[1:], strict=True)
        if any(x.shape != cached.shape or not torch.equal(x[:, :, -1], cached[:, :, -1]) for x, cached in read):
            self._flush(None, "its attention does not read the cached keys and values as they are (latent attention)")
        else:
            self._flush(replace(attention, hidden=self.inputs.get(attention.module)), "")
        self.inputs.clear()

    def _read_again(self, index: int | None, attention: Attention, key: Tensor, value: Tensor) -> None:
        """A layer that caches nothing attends to what another one has cached; known by its numbers, since a model that
        lies on several devices hands over copies."""
        if self.on_reader is None or index is None or index in self.owners:
            return
        newest = key[:, :, -1], value[:, :, -1]
        for layer, known in self.owners.items():
            if all(a.shape == b.shape and torch.equal(a, b.to(a.device)) for a, b in zip(newest, known, strict=True)):
                positions, valid = self.positions.to(key.device), self.valid.to(key.device)
                self.on_reader(Observation(layer, key, value, positions, valid, attention, reader=index))
                return

    def _flush(self, attention: Attention | None, unseen: str) -> None:
        if self.pending is None:
            return
        (layer, key, value), self.pending = self.pending, None
        positions, valid = self.positions.to(key.device), self.valid.to(key.device)
        self.listener(Observation(layer, key, value, positions, valid, attention, unseen))


@contextmanager
def _inputs_kept(model: nn.Module, inputs: dict[nn.Module, Tensor]) -> Iterator[None]:
    """Note the hidden states that each attention module is called with, for the duration."""

    mine = get_ident()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if get_ident() == mine and isinstance(hidden, Tensor) and hidden.ndim == 3 and hidden.is_floating_point():
            inputs[module] = hidden

    attentions = [module for module in model.modules() if getattr(module, "layer_idx", None) is not None]
    with ExitStack() as hooks:
        for module in attentions:
            hooks.callback(before_forward(module, note))
        yield


def _shares(model: nn.Module) -> bool:
    return any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())


def _headless(model: nn.Module) -> nn.Module:
    """The model without its vocabulary projection, unless that can be told to project one position only."""
    base = getattr(model, "base_model", model)
    return model if "logits_to_keep" in parameters(model) or not isinstance(base, nn.Module) else base


@contextmanager
def _attention_function(model: nn.Module, attend: Callable[[Attention, Tensor, Tensor], None]) -> Iterator[None]:
    """Route the model's attention past `attend` for the duration; models that cannot be routed are left alone."""
    from karhunen.hf.queries import showing  # which builds on what stands here

    if not can_be_routed(model):
        yield
        return

    def watch(attention: Attention, key: Tensor, value: Tensor, plain: Callable[[], Any]) -> Any:
        attend(attention, key, value)
        return plain()

    with showing(model, watch):
        yield


def can_be_routed(model: nn.Module) -> bool:
    """Whether the model's attention goes through transformers' interface."""
    return isinstance(model, PreTrainedModel) and model._can_set_attn_implementation()  # pyright: ignore[reportPrivateUsage]


def attention_call(module: nn.Module, query: Tensor, mask: Any, arguments: Mapping[str, Any]) -> Attention:
    """What transformers hands to an attention function, as a value."""
    scale = arguments.get("scaling")
    sinks = arguments.get("s_aux")
    return Attention(
        module=module,
        query=query,
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        mask=mask if isinstance(mask, Tensor) and mask.ndim == 4 else None,
        window_tokens=arguments.get("sliding_window"),
        softcap=arguments.get("softcap"),
        sinks=sinks if isinstance(sinks, Tensor) else getattr(module, "sinks", None),
    )


def own_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function a module's own file uses under `name`; "eager" is a function of that file."""
    for kind in type(module).__mro__:
        names = vars(sys.modules.get(kind.__module__, object))
        if name == "eager" and "eager_attention_forward" in names:
            return names["eager_attention_forward"]
        if name != "eager" and "ALL_ATTENTION_FUNCTIONS" in names:
            return names["ALL_ATTENTION_FUNCTIONS"][name]
    raise ValueError(f"cannot find the {name} attention of {type(module).__name__}")


def plain_implementation(model: PreTrainedModel, names: Mapping[int, tuple[Any, str | None]]) -> str:
    """The implementation to delegate to: the model's own, or a plain one where its own needs a packed layout."""
    config = text_config(model)
    name = names[id(config)][1] if id(config) in names else getattr(config, "_attn_implementation", None)
    name = name.removeprefix(SHOWN) if isinstance(name, str) else name
    if name in ("eager", "sdpa"):
        return str(name)
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def implementations(model: nn.Module) -> dict[int, tuple[Any, str | None]]:
    """Every configuration in a model, nested ones too, with the attention implementation it names."""
    found: dict[int, tuple[Any, str | None]] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config, config._attn_implementation_internal
        waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return found
