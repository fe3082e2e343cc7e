"""A model without its weights: for arithmetic before anything large is read, and for placing it on devices."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from karhunen.hf.embedded import explaining_settings, resolved
from karhunen.hf.gguf import silent_transformers
from karhunen.hf.model_sources import Reporter


def skeleton(name_or_path: str | Path, dtype: torch.dtype, progress: Reporter | None = None) -> nn.Module:
    """The model on PyTorch's meta device; only its configuration is read. ModelUnavailable if there is none."""
    import transformers

    path, local = resolved(name_or_path, progress)
    with silent_transformers(), explaining_settings(path):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=local)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def skeleton_of(settings: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The same of the settings of a config.json. ModelUnavailable if transformers has no such model."""
    import transformers

    kind = str(settings["model_type"])
    with silent_transformers(), explaining_settings(kind):
        rest = {name: value for name, value in settings.items() if name != "model_type"}
        config = transformers.AutoConfig.for_model(kind, **{"pad_token_id": 0, **rest})
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def spread(model: nn.Module, room: Mapping[int | str, int]) -> dict[str, Any]:
    """Module name to device for a model over devices with so many bytes of room for weights, whole layers each.

    ValueError where they do not hold it.
    """
    from accelerate import infer_auto_device_map

    whole: list[str] = sorted(getattr(model, "_no_split_modules", None) or [])
    tied: Any = getattr(model, "tie_weights", None)
    if tied is not None:
        tied()  # as one, a shared weight counts once
    with _quiet(
        "accelerate.utils.modeling"
    ):  # it warns of devices that are not here: a plan may be for another machine
        placed = infer_auto_device_map(model, max_memory={**room, "disk": 0}, no_split_module_classes=whole)
    if "disk" in placed.values():
        raise ValueError(
            f"the weights do not fit into the {sum(room.values()) / 1e9:.1f} GB that are left for them on {len(room)} "
            "devices; use more devices or a smaller dtype"
        )
    return dict(placed)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
