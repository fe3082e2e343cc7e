"""Calibration input as sequences of token ids, each within what the model is run on at once.

a path, text, a chat, rows of a data set (text, input_ids, messages), token ids ─▶ texts or ids ─▶ sequences
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from karhunen.calibration.texts import read_texts
from karhunen.device import HOST

Input = str | Path | Tensor | Mapping[str, Any] | Iterable[Any]

TEXT, IDS, MASK, CHAT = "text", "input_ids", "attention_mask", "messages"
LONGEST_PATH = 4096
KINDS = (
    "give text, a path to text files, token ids, a tokenizer's batch, chats (lists of {'role', 'content'}), or rows or "
    f"a data set with a column {TEXT!r}, {CHAT!r} or {IDS!r}"
)


def sequences(
    given: Any, tokenizer: Any, sequence_tokens: int, max_tokens: int, min_tokens: int
) -> list[Int[Tensor, " _"]]:
    """Sequences of at most `sequence_tokens`, `max_tokens` in all; remainders below `min_tokens` are left out.

    `given` is text (one or many), paths of text files or folders of them, chats, rows with a column of one of these,
    lists of token ids, a tensor [b t] or [t], or a tokenizer's padded batch with its attention mask. Text is cut into
    sequences that each begin as the tokenizer begins a text. The tokenizer is only called, never changed. ValueError
    for what is none of these, for empty input, and for text shorter than `min_tokens`.
    """
    wholes, prefix = _token_ids(given, tokenizer)
    room = sequence_tokens - len(prefix)
    if room < 1:
        raise ValueError(f"sequence_tokens={sequence_tokens} leaves no room after the token that begins a text")
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


def _token_ids(given: Any, tokenizer: Any) -> tuple[list[list[int]], list[int]]:
    """Token ids, and the token that each sequence of them begins with."""
    if isinstance(given, Mapping) and IDS in given:
        return _batch(cast("Mapping[str, Any]", given)), []
    if _is_array(given):
        return _id_rows(given), []
    items = _items(given)
    if all(isinstance(item, Mapping) and IDS in item for item in items):
        return [row for item in items for row in _batch(item)], []
    if not any(isinstance(item, str | Mapping) for item in items):
        if not any(_is_chat(item) for item in items):
            return _id_rows(items), []
        items = [{CHAT: item} for item in items]
    if tokenizer is None:
        raise ValueError("calibration on text needs the model's tokenizer; pass tokenizer=... or token ids")
    texts = [text for item in items if (text := _text(item, tokenizer)).strip()]
    if not texts:
        raise ValueError("the calibration text is empty")
    return [_encode(tokenizer, text) for text in texts], _prefix(tokenizer, texts[0])


def _items(given: Any) -> list[Any]:
    """What was given, one text, row or list of ids after the other."""
    if isinstance(given, str | Path):
        return list(read_texts([given])) if _is_path(given) else [given]
    if isinstance(given, Mapping) or hasattr(given, "column_names"):
        columns = list(getattr(given, "column_names", None) or given)
        column = next((name for name in (TEXT, CHAT, IDS) if name in columns), None)
        if column is None:
            raise ValueError(f"there is no column of text among {columns}; {KINDS}")
        held = [given[column]] if isinstance(given[column], str) else list(given[column])
        return held if column == TEXT else [{column: item} for item in held]
    if not isinstance(given, Iterable):
        raise ValueError(f"a {type(given).__name__} cannot be calibrated on; {KINDS}")
    items = list(cast("Iterable[Any]", given))
    if items and all(isinstance(item, Path) for item in items):
        return list(read_texts(items))
    return [{CHAT: items}] if _is_chat(items) else items


def _is_path(given: str | Path) -> bool:
    """A text is taken for a path if something lies there."""
    if isinstance(given, Path):
        return True
    try:
        return 0 < len(given) < LONGEST_PATH and "\n" not in given and "\0" not in given and Path(given).exists()
    except OSError:  # longer than a name may be
        return False


def _is_chat(item: Any) -> bool:
    messages = list(cast("Sequence[Any]", item)) if isinstance(item, list | tuple) else []
    return bool(messages) and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages)


def _text(item: Any, tokenizer: Any) -> str:
    """Of a text, or of a row that holds one."""
    if isinstance(item, Mapping):
        row = cast("Mapping[str, Any]", item)
        if CHAT in row and _is_chat(row[CHAT]):
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError("chats need a tokenizer with a chat template, which this one has not; give their text")
            return str(tokenizer.apply_chat_template(list(row[CHAT]), tokenize=False))
        if TEXT not in row:
            raise ValueError(f"there is no column of text among {list(row)}; {KINDS}")
        item = row[TEXT]
    if not isinstance(item, str):
        raise ValueError(f"a {type(item).__name__} is among the calibration texts; {KINDS}")
    return item


def _batch(batch: Mapping[str, Any]) -> list[list[int]]:
    """The rows of a tokenizer's batch without their padding."""
    rows = _id_rows(batch[IDS])
    if MASK not in batch:
        return rows
    masks = _id_rows(torch.as_tensor(batch[MASK], device=HOST).long())
    return [[i for i, keep in zip(row, mask, strict=True) if keep] for row, mask in zip(rows, masks, strict=True)]


def _id_rows(given: Any) -> list[list[int]]:
    """One row for each sequence of ids, however they are nested."""
    if _is_array(given):
        ids = torch.as_tensor(given, device=HOST)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"token ids are whole numbers, and these are {ids.dtype}; give what the tokenizer returns")
        if ids.ndim not in (1, 2):
            raise ValueError(f"token ids have the shape [sequences, tokens] or [tokens], not {tuple(ids.shape)}")
        return torch.atleast_2d(ids).tolist()
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise ValueError(f"a {type(given).__name__} is among the token ids; {KINDS}")
    items = list(cast("Iterable[Any]", given))
    if items and all(_is_id(item) for item in items):
        return [[int(item) for item in items]]
    return [row for item in items for row in _id_rows(item)]


def _is_array(given: Any) -> bool:
    return isinstance(given, Tensor) or (hasattr(given, "__array__") and not hasattr(given, "column_names"))


def _is_id(item: Any) -> bool:
    return not isinstance(item, bool) and isinstance(item, Integral)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def _prefix(tokenizer: Any, text: str) -> list[int]:
    """The begin-of-sequence token, if the tokenizer puts one before a text."""
    start = tokenizer(text[:64], truncation=False)["input_ids"][:1]
    bos = getattr(tokenizer, "bos_token_id", None)
    return list(start) if start and start[0] == bos and _encode(tokenizer, text[:64])[:1] != list(start) else []
