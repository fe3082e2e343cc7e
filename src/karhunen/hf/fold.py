"""A codec's transform folded into a model's weights: a folder that loads like any model and caches latents.

W_K → W_down W_up of rank r_K, W_V → W_down W_up of rank r_V, W_O → its correction
cache of a layer: r_K + r_V numbers a token in place of 2 · heads · d

Source: SPECTRA (arXiv:2608.07915). The factors are those of G^½ W (transforms/spectra_latent.py), biases carried by the
constant in G; with QK-norm the latent stands before the norm: rebuild, norm, rotate, as the paper says.
"""

import importlib.util
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn

from karhunen.codec import Codec, SideCodec
from karhunen.folder import check_new, open_to_readers
from karhunen.hf.describe import identity_of
from karhunen.hf.input_maps import linear_map
from karhunen.hf.output_weights import Weights
from karhunen.quantizers.affine import AffineQuantizer
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import SLOTS, Slot
from karhunen.transforms.spectra_latent import factor, low_rank

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
MODELING = "modeling_folded.py"
BASE_LINE = "from transformers import LlamaForCausalLM as Base"

Ranks = Mapping[int, tuple[int, int]]


def fold(
    model: nn.Module,
    statistics: Statistics,
    folder: Path | str,
    ranks: Ranks,
    output_weights: Weights | None = None,
    tokenizer: Any = None,
) -> Path:
    """Write the folded model: weights, configuration, and the file that defines it; `ranks` says which layers and how.

    Load it with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. `output_weights` are corrected
    W_O (calibration/output_correction.py). The model given is left alone. ValueError for a family this was not tested
    on, statistics of another model or without activations, ranks that do not fit, and a folder that is not empty.
    """
    target, source = Path(folder), cast("Any", model)
    check_new(target)
    if source.config.model_type not in FAMILIES:
        raise ValueError(f"a {source.config.model_type} cannot be folded; tested families are {', '.join(FAMILIES)}")
    if reason := statistics.model.mismatch(identity_of(model)):
        raise ValueError(f"these statistics do not fit the model: {reason}")
    state = dict(source.state_dict())
    for layer, pair in ranks.items():
        state = _folded_layer(state, source.model.layers[layer].self_attn, statistics, layer, pair, output_weights)
    target.mkdir(parents=True, exist_ok=True)
    text = (Path(__file__).parent / MODELING).read_text(encoding="utf-8")
    named = f"from transformers import {type(model).__name__} as Base"
    (target / MODELING).write_text(text.replace(BASE_LINE, named), encoding="utf-8")
    config = deepcopy(source.config)
    config.auto_map = {"AutoModelForCausalLM": f"{Path(MODELING).stem}.FoldedForCausalLM"}
    config.karhunen_ranks = {str(layer): list(pair) for layer, pair in ranks.items()}
    folded = _defined_in(target / MODELING).FoldedForCausalLM(config).to(source.dtype)
    folded.load_state_dict(state)
    folded.save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    open_to_readers(target)
    return target


def kept_ranks(codec: Codec) -> dict[int, tuple[int, int]]:
    """(r_K, r_V) of every coded layer: the coefficients that water-filling gives any bits; ValueError if they are not
    those of joined heads, whose latent is one for the layer."""
    return {i: (_kept(i, "key", layer.key), _kept(i, "value", layer.value)) for i, layer in codec.layers.items()}


def rank_cut(
    module: nn.Module, slot: Slot, measured: LayerStatistics, rank: int
) -> tuple[Float[Tensor, "inputs r"], Float[Tensor, "r e"]]:
    """(W_down with the bias as last row, W_up) of one side of an attention module; ValueError if it cannot be had."""
    projection = linear_map(module, slot)
    if projection is None:
        raise ValueError(f"{type(module).__name__} has no plain projection to the {slot}s")
    if not 1 <= rank <= len(projection.bias):
        raise ValueError(f"rank={rank} of the {slot}s is out of range; use 1 to {len(projection.bias)}")
    found = [v for need, v in measured.measured.items() if need.kind == "activations" and isinstance(v, Moments)]
    if not found:
        raise ValueError("folding needs the activations' Gram matrix; calibrate with the needs of SpectraLatent")
    return low_rank(factor(found[0], projection), projection, rank)


def _folded_layer(
    state: dict[str, Tensor],
    module: nn.Module,
    statistics: Statistics,
    layer: int,
    ranks: tuple[int, int],
    output_weights: Weights | None,
) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}.self_attn."
    if layer not in statistics.layers:
        raise ValueError(f"layer {layer} was never observed during calibration")
    state = dict(state)
    for slot, rank in zip(SLOTS, ranks, strict=True):
        down, up = rank_cut(module, slot, statistics.layers[layer], rank)
        old = state.pop(f"{prefix}{slot[0]}_proj.weight")
        state[f"{prefix}{slot[0]}_down.weight"] = down[:-1].mT.to(old).contiguous()
        state[f"{prefix}{slot[0]}_up.weight"] = up.mT.to(old).contiguous()
        if state.pop(f"{prefix}{slot[0]}_proj.bias", None) is not None:
            state[f"{prefix}{slot[0]}_down.bias"] = down[-1].to(old)
    if output_weights is not None and layer in output_weights:
        name = f"{prefix}o_proj.weight"
        state[name] = output_weights[layer].to(state[name])
    return state


def _kept(layer: int, slot: Slot, side: SideCodec) -> int:
    if not side.frame.joined or not isinstance(side.quantizer, AffineQuantizer):
        raise ValueError(f"layer {layer}: the {slot}s are not in a latent joined over heads; fold a codec of `spectra`")
    return max(1, int((side.quantizer.bits > 0).sum()))


def _defined_in(file: Path) -> Any:
    """The module in a file, under a name of its own."""
    name = f"karhunen_folded_{abs(hash(file.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
