"""The state of the layers that no page holds (sliding, recurrent, convolutional), at one token, as a page of its own.

    layers ─▶ attributes ─▶ { JSON } { safetensors } ─▶ frame of kind STATE, first_token = tokens read so far

Without it a prefix of such a model cannot be restored, so it is stored and restored with the pages or not at all.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from karhunen.hf.layer_state import layer_state, restore_layer
from karhunen.pages import PageCodec
from karhunen.pages.frame import EXACT, STATE, Entry, Frame, Section, read
from karhunen.values import assemble, dismantle


def state_page(codec: PageCodec, layers: Mapping[int, Any], n_tokens: int) -> bytes:
    """The state of `layers` after `n_tokens`; ValueError if one keeps what cannot be written."""
    tensors: dict[str, Tensor] = {}
    states = {index: {"kind": type(layer).__name__, "state": layer_state(layer)} for index, layer in layers.items()}
    text = json.dumps(dismantle(states, tensors)).encode()
    # a layer may keep views of one tensor; safetensors wants each to have memory of its own
    numbers = save({name: x.cpu().contiguous().clone() for name, x in tensors.items()})
    entry = Entry(0, EXACT, 0, 0, 0, 0, (len(text),), (len(numbers),))
    return Frame(STATE, codec.dtype_name, codec.owner, n_tokens, 0, (Section(entry, b"", (text,), (numbers,)),)).write()


def restore_state(
    codec: PageCodec, page: bytes, layers: Mapping[int, Any], n_tokens: int, device: torch.device
) -> None:
    """The mirror of `state_page`, onto new layers; ValueError, with the reason, if the page is refused."""
    frame = read(page)
    if frame.kind != STATE or len(frame.sections) != 1:
        raise ValueError("this is a page of tokens, not the state of layers")
    if reason := frame.owner.mismatch(codec.owner):
        raise ValueError(f"a state that is not ours: {reason}")
    if frame.dtype != codec.dtype_name:
        raise ValueError(f"a state of {frame.dtype}, not of {codec.dtype_name}; make it again")
    if frame.first_token != n_tokens:
        raise ValueError(f"a state after {frame.first_token} tokens, not after {n_tokens}")
    section = frame.sections[0]
    if (len(section.key), len(section.value)) != (1, 1):
        raise ValueError("a state in other parts than two; make it again")
    try:
        states: Any = assemble(json.loads(bytes(section.key[0])), {}, load(bytes(section.value[0])))
        for index, layer in layers.items():
            held = states[index]
            if held["kind"] != type(layer).__name__:
                raise ValueError(f"layer {index} is a {held['kind']}, this model's is a {type(layer).__name__}")
            restore_layer(layer, held["state"], device)
    except (SafetensorError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a state that cannot be restored ({type(error).__name__}: {error})") from error
