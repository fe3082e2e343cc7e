"""What a prompt loses that comes back from pages: every whole page decoded, no exact window behind them.

dense cache of the prompt ─▶ pages ─▶ dense cache again ─▶ scored tokens, against the dense run

A compressed cache keeps the newest tokens exact and codes the others; a restored prefix has only what pages keep exact.
"""

from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.evaluation.scores.score import DenseRun, Tick, compared_with
from karhunen.hf.probe import inference
from karhunen.pages import PageCodec

PAGE_TOKENS = 256


def score_restored(
    model: nn.Module, codec: Codec, dense: DenseRun, tick: Tick = lambda _: None
) -> tuple[Float[Tensor, " m"], Bool[Tensor, " m"]]:
    """KL in nats and agreement of the scored tokens after a restored prompt.

    Tokens after the last whole page stay exact, as they would be read. ValueError if the codec makes no pages.
    """
    pages = PageCodec(codec, next(model.parameters()).dtype)
    granule, n_prompt = pages.granule_tokens, dense.document.prefill_tokens
    page = min(-(-PAGE_TOKENS // granule), n_prompt // granule) * granule
    if not pages.layers or not page:
        raise ValueError(f"a prompt of {n_prompt} tokens makes no page of this codec")
    n = n_prompt // page * page
    with inference(model):
        cache = deepcopy(dense.cache)
        layers: dict[int, Any] = {index: cache.layers[index] for index in pages.layers}
        given = {i: (layer.keys[0, :, :n], layer.values[0, :, :n]) for i, layer in layers.items()}
        for i, (key, value) in pages.decode_layers(pages.encode_pages(given, torch.arange(n, device=HOST), page)):
            layers[i].keys[0, :, :n] = key
            layers[i].values[0, :, :n] = value
        kl, agree, _, _ = compared_with(model, dense, cache, tick)
    return kl, agree
