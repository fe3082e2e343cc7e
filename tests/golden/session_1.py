"""A session of format version 1, and what it held: made once, by the code of commit 2f371e0.

python -m tests.golden.session_1      writes both anew (there, with src on PYTHONPATH): later code writes version 2

The model is of two layers, its weights whole numbers by rule over powers of two: no processor makes others. Its codec
is the recipe `karhunen` as of codec version 2.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tests.golden.version_1 import integers
from tests.hf.tiny import SIZES
from tests.synthetic import quick, statistics
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from karhunen.codec import Codec, Origin
from karhunen.fitting import fit
from karhunen.hf.cache import CompressedCache
from karhunen.hf.describe import identity_of
from karhunen.hf.probe import forward, inference
from karhunen.recipes import make
from karhunen.windows.sink_recent import SinkRecent

SESSION = Path(__file__).parent / "session_1"
EXPECTED = Path(__file__).parent / "session_1_expected.safetensors"
N_READ = 60
TOKENS = integers(1, N_READ + 1, salt=23) % 99


def golden_model() -> Any:
    """Of two heads of eight coordinates."""
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    numbers = [*sorted(model.named_parameters()), *sorted(model.named_buffers())]
    for i, (_, tensor) in enumerate(numbers):
        tensor.data.copy_((integers(*tensor.shape, salt=i) - 128).to(tensor.dtype) / 256)
    return model


def held_by(cache: CompressedCache) -> dict[str, Tensor]:
    """Codes and exact tokens of every layer as they are held."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.coded_layers()):
        found |= {f"{index}.{name}": x.contiguous() for name, x in layer.store.tensors().items()}
    return found


def next_logits(model: Any, cache: CompressedCache) -> Tensor:
    """After the token that was not read yet."""
    with inference(model):
        return forward(model, cache, TOKENS[:, N_READ:]).logits[0, -1].float()


def main() -> None:
    model, recipe = golden_model(), quick(make("karhunen"))
    identity = identity_of(model)
    layer = fit(recipe, statistics(recipe, identity.layers[0])).layers[0]
    codec = Codec(identity, SinkRecent(4, 10), {0: layer, 1: layer}, {}, Origin("session 1, made by 2f371e0"))
    cache = CompressedCache(model, codec)
    with inference(model):
        forward(model, cache, TOKENS[:, :N_READ])
    cache.save(SESSION, TOKENS, 1.5)
    held = held_by(cache)
    save_file({**held, "logits": next_logits(model, cache)}, EXPECTED)


if __name__ == "__main__":
    main()
