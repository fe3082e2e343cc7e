"""The dense model's reading of a text, and what it answered: made once, kept in memory or in a folder.

folder/<hash of weights, text and questions>.safetensors: keys and values of every layer; beside it .json, the answers
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from karhunen.evaluation.tasks.questions import HELD_BYTES
from karhunen.hf.cache import dense_cache
from karhunen.hf.describe import identity_of

Answers = list[list[int]]


@final
class DenseMemory:
    """Of one model. Without a folder, caches stay in memory up to HELD_BYTES; others are read again. A cache with
    layers that are not plain keys and values (sliding windows, recurrent states) is never written to a folder."""

    def __init__(self, model: nn.Module, folder: Path | None = None) -> None:
        self.model, self.folder = model, folder
        self._caches: dict[str, Any] = {}
        self._answers: dict[str, Answers] = {}
        self._held_bytes = 0

    def of(
        self, text: Tensor, questions: Sequence[Tensor], read: Callable[[], Any], answered: Callable[[Any], Answers]
    ) -> tuple[Any, Answers]:
        """The cache after the text, which is not to be changed, and the answers; made by `read` and `answered` where
        they are not there."""
        name = self._name(text, questions)
        cache = self._cache(name)
        if cache is None:
            cache = read()
            self._keep(name, cache)
        if name not in self._answers:
            self._answers[name] = self._read_answers(name) or answered(cache)
            self._write_answers(name)
        return cache, self._answers[name]

    def _name(self, text: Tensor, questions: Sequence[Tensor]) -> str:
        digest = hashlib.sha256(identity_of(self.model).weights_hash.encode())
        digest.update(str(next(self.model.parameters()).dtype).encode())
        for tokens in (text, *questions):
            digest.update(tokens.numpy().tobytes() + b"|")
        return digest.hexdigest()[:24]

    def _cache(self, name: str) -> Any:
        if self.folder is None or not (file := self.folder / f"{name}.safetensors").is_file():
            return self._caches.get(name)
        from safetensors.torch import load_file

        held, cache = load_file(file), dense_cache(self.model)
        for i in range(len(held) // 2):
            cache.update(held[f"key.{i}"], held[f"value.{i}"], i)
        return cache

    def _keep(self, name: str, cache: Any) -> None:
        layers: list[Any] = list(cache.layers)
        if self.folder is None or any(getattr(layer, "is_sliding", True) for layer in layers):
            size = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if hasattr(layer, "keys"))
            if self._held_bytes + size <= HELD_BYTES:
                self._caches[name] = cache
                self._held_bytes += size
            return
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {}
        for i, layer in enumerate(layers):
            tensors |= {f"key.{i}": layer.keys.contiguous(), f"value.{i}": layer.values.contiguous()}
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{name}.part"
        save_file(tensors, part)
        part.rename(self.folder / f"{name}.safetensors")

    def _read_answers(self, name: str) -> Answers:
        file = None if self.folder is None else self.folder / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else []

    def _write_answers(self, name: str) -> None:
        if self.folder is not None:
            file = self.folder / f"{name}.json"
            file.write_text(json.dumps(self._answers[name]), encoding="utf-8")
