"""Calibration input as sequences of token ids, each within what the model is run on at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from karhunen.device import HOST

Input = str | Sequence[str] | Sequence[Sequence[int]] | Tensor | Mapping[str, Tensor]


def sequences(
    given: Input, tokenizer: Any, sequence_tokens: int, max_tokens: int, min_tokens: int
) -> list[Int[Tensor, " _"]]:
    """Sequences of at most `sequence_tokens`, `max_tokens` in all; remainders below `min_tokens` are left out.

    `given` is text (one or many), lists of token ids, a tensor [b t], or a tokenizer's padded batch with its
    attention mask. Text is cut into sequences that each begin as the tokenizer begins a text. The tokenizer is only
    called, never changed. ValueError for empty input, and for text shorter than `min_tokens`.
    """
    wholes, prefix = _token_ids(given, tokenizer)
    room = sequence_tokens - len(prefix)
    pieces = [[*prefix, *ids[i : i + room]] for ids in wholes for i in range(0, len(ids), room)]
    kept: list[Tensor] = []
    total = 0
    for piece in pieces:
        ids = piece[: max_tokens - total]
        if len(ids) >= min_tokens:
            kept.append(torch.tensor(ids, device=HOST))
            total += len(ids)
    if not kept:
        longest = max((len(piece) for piece in pieces), default=0)
        if longest == 0:
            raise ValueError("the calibration text is empty")
        raise ValueError(
            f"the calibration text is too short: its longest piece has {longest} tokens, and {min_tokens} are needed "
            "beyond which anything can be measured (the recipe keeps the first tokens of every sequence exact)"
        )
    return kept


def _token_ids(given: Input, tokenizer: Any) -> tuple[list[list[int]], list[int]]:
    if isinstance(given, Mapping):
        ids = given["input_ids"]
        mask = given["attention_mask"].bool() if "attention_mask" in given else torch.ones_like(ids).bool()
        return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)], []
    if isinstance(given, Tensor):
        return [[int(i) for i in row] for row in torch.atleast_2d(given)], []
    items: list[Any] = [given] if isinstance(given, str) else list(given)
    if not any(isinstance(item, str) for item in items):
        return [[int(i) for i in item] for item in items], []
    if tokenizer is None:
        raise ValueError("calibration on text needs the model's tokenizer; pass tokenizer=... or token ids")
    texts = [text for text in items if text.strip()]
    if not texts:
        raise ValueError("the calibration text is empty")
    return [_encode(tokenizer, text) for text in texts], _prefix(tokenizer, texts[0])


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def _prefix(tokenizer: Any, text: str) -> list[int]:
    """The begin-of-sequence token, if the tokenizer puts one before a text."""
    start = tokenizer(text[:64], truncation=False)["input_ids"][:1]
    bos = getattr(tokenizer, "bos_token_id", None)
    return list(start) if start and start[0] == bos and _encode(tokenizer, text[:64])[:1] != list(start) else []
