"""Asking a model about itself: short forwards of random tokens whose cache updates are recorded.

The forward is the model's own; it runs in evaluation mode, without gradients, and leaves the modes as they were.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from karhunen.device import HOST

Update = tuple[Float[Tensor, "..."], Float[Tensor, "..."]]  # keys, values; sizes differ between layers

F = TypeVar("F", bound=Callable[..., Any])

N_PROBE_TOKENS = 10


@final
class RecordingCache(DynamicCache):
    """A plain dynamic cache that shows every update (layer, new keys, new values) to a listener before storing it.

    The two slots may differ in every dimension but the batch and the tokens (latent attention).
    """

    def __init__(self, model: nn.Module, listener: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__(config=text_config(model))
        self.listener = listener

    def update(  # the keyword names are those of the library
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Show, then store."""
        self.listener(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def text_config(model: nn.Module) -> Any:
    """The configuration of the model's text decoder; ValueError for models that are not decoders of text."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(f"{type(model).__name__} is not a transformers model: it has no config")
    decoder = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(decoder, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoder caches are coded")
    return decoder


def cache_argument(model: nn.Module) -> str:
    """Under which name the model's forward takes a cache: `cache` (since 5.24) or `past_key_values`.

    ValueError if it takes none.
    """
    names = parameters(model)
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ValueError(f"{type(model).__name__} takes no cache argument: it has no attention cache to compress")


def parameters(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of a model's forward."""
    return frozenset(inspect.signature(uncompiled(model).forward).parameters)


def untraced(function: F) -> F:
    """Left to Python by `torch.compile`, whose graph breaks there: what decides on the host what is coded and read.
    torch's own wrapper costs microseconds a call, so it stands only where something is traced."""
    left = torch.compiler.disable(function)

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        return left(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return cast("F", either)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` has wrapped, which shares its weights; any other as it is."""
    return cast("nn.Module", getattr(model, "_orig_mod", model))


def decoder_of(model: nn.Module) -> nn.Module:
    """The part that attends to text, which is told where its tokens stand; the body where there is no such part."""
    body = cast("nn.Module", getattr(model, "base_model", model))
    found = getattr(body, "language_model", None)
    return found if isinstance(found, nn.Module) else body


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; each submodule's mode is put back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def forward(model: nn.Module, cache: Any, input_ids: Int[Tensor, "b t"], **arguments: Any) -> Any:
    """One forward into `cache`; logits are computed for the last position only, where the model allows it and
    `arguments` do not say which."""
    names = parameters(model)
    if "logits_to_keep" in names:
        arguments.setdefault("logits_to_keep", 1)
    device = input_device(model)
    tensors = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    return uncompiled(model)(
        input_ids=input_ids.to(device), use_cache=True, **{cache_argument(model): cache}, **tensors
    )


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go: the first weights' device, or where accelerate's hooks bring weights that are kept elsewhere.

    ValueError for a model without weights.
    """
    first = next(model.parameters())
    if not first.is_meta:
        return first.device
    hooks: list[Any] = [getattr(module, "_hf_hook", None) for module in model.modules()]
    found = next((h.execution_device for h in hooks if getattr(h, "execution_device", None) is not None), None)
    if found is None:
        raise ValueError(f"the weights of {type(model).__name__} are not loaded")
    return torch.device(found)


def layer_devices(model: nn.Module) -> dict[int, torch.device]:
    """Where the attention of each layer lies, by the layer's index, as far as modules say which they are of."""
    found: dict[int, torch.device] = {}
    for module in model.modules():
        weight, index = next(module.parameters(), None), getattr(module, "layer_idx", None)
        if isinstance(index, int) and weight is not None and not weight.is_meta:
            found.setdefault(index, weight.device)
    return found


def updates(model: nn.Module, input_ids: Int[Tensor, "b t"], **arguments: Any) -> dict[int, Update]:
    """What each layer hands to its cache in one forward, by layer; layers that hand over nothing are absent."""
    seen: dict[int, Update] = {}

    def listen(layer: int, key: Tensor, value: Tensor) -> None:
        seen[layer] = key, value

    with inference(model):
        forward(model, RecordingCache(model, listen), input_ids, **arguments)
    return seen


def probe_tokens(model: nn.Module, n_tokens: int = N_PROBE_TOKENS) -> Int[Tensor, "1 t"]:
    """Ordinary token ids, the same at every call: none that the configuration names (padding, images, ...)."""
    config: Any = text_config(model)
    settings = {**vars(model.config), **vars(config)}  # type: ignore[arg-type]
    special = {v for k, v in settings.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    size = int(getattr(config, "vocab_size", 0) or 0)
    if size < 2:
        raise ValueError(f"{type(model).__name__} has no vocabulary to probe it with")
    ids = torch.randperm(size, generator=torch.Generator(HOST).manual_seed(0), device=HOST)[
        : n_tokens + len(special)
    ].tolist()
    ordinary = [i for i in ids if i not in special] or ids
    return torch.tensor([(ordinary * n_tokens)[:n_tokens]], device=HOST)


def n_positions(model: nn.Module) -> int:
    """Positions at which the rotation is the one short texts get: below any that scaling switches at."""
    config: Any = text_config(model)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits += [settings.get("original_max_position_embeddings") for settings in nested]
    limits += [getattr(module, "original_max_seq_len", None) for module in model.modules()]
    return min((int(limit) for limit in limits if isinstance(limit, int | float) and limit > 0), default=2048)
