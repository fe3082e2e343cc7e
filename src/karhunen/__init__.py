"""karhunen compresses the KV cache of language models by transform coding.

    statistics = karhunen.calibrate(model, text, recipe.needs(), tokenizer)
    codec = karhunen.fit(recipe, statistics)
    with karhunen.compressed(model, codec):
        model.generate(...)

Nothing heavy is imported until it is used.
"""

import importlib
from typing import Any

_HOME = {
    "Codec": "karhunen.codec",
    "Recipe": "karhunen.recipe",
    "Side": "karhunen.recipe",
    "fit": "karhunen.fitting",
    "make": "karhunen.recipes",
    "names": "karhunen.recipes",
    "Statistics": "karhunen.statistics.gathered",
    "calibrate": "karhunen.calibration.calibrate",
    "PageCodec": "karhunen.pages",
    "CompressedCache": "karhunen.hf.cache",
    "PrefixCache": "karhunen.hf.prefix_cache",
    "HubCodec": "karhunen.hf.hub",
    "compressed": "karhunen.hf.compressed",
    "make_cache": "karhunen.hf.compressed",
    "enable": "karhunen.hf.attention",
    "load": "karhunen.hf.embedded",
}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'karhunen' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
