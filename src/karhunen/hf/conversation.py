"""A conversation that is kept in a folder between two runs: its cache and its tokens.

first run:   prompt ─▶ read ─▶ answer ─▶ FOLDER
later runs:  FOLDER ─▶ restored; only the next message is read ─▶ answer ─▶ FOLDER
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from karhunen.codec import Codec
from karhunen.device import HOST
from karhunen.folder import CONFIG
from karhunen.hf.cache import CompressedCache
from karhunen.hf.generation import Generation, OnCache, OnText, Sampling, generate, prompt_tokens
from karhunen.hf.reading_time import reading_seconds
from karhunen.hf.session import load_session


@final
@dataclass(frozen=True)
class Resumed:
    """What a folder gave: tokens that need not be read again, what restoring them took, and about what reading them
    takes (`reading_time`)."""

    n_tokens: int = 0
    restore_seconds: float = 0.0
    reading_seconds: float = 0.0

    @property
    def seconds_saved(self) -> float:
        """About; 0 if nothing was restored, or reading is faster."""
        return max(0.0, self.reading_seconds - self.restore_seconds)


def converse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    codec: Codec,
    folder: str | Path,
    *,
    chat: bool | None = None,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    on_text: OnText | None = None,
    on_cache: OnCache | None = None,
) -> tuple[Generation, Resumed]:
    """Answer `prompt` as the next message of the conversation in `folder`, or as its first; then write the folder.

    ValueError, with the reason, if the folder holds another model's or codec's conversation, or something else.
    """
    if (Path(folder) / CONFIG).is_file():
        start = time.perf_counter()
        cache, state = load_session(model, folder, codec)
        taken = time.perf_counter() - start
        if state.tokens is None or state.tokens.shape[0] != 1:
            raise ValueError(f"{folder} does not say which tokens it has read; it was not saved by a conversation")
        resumed = Resumed(cache.get_seq_length(), taken)
        tokens = torch.cat([state.tokens, next_tokens(tokenizer, prompt, chat, state.tokens)], dim=1)
    else:
        cache, resumed = CompressedCache(model, codec), Resumed()
        tokens = prompt_tokens(tokenizer, prompt, chat)
    result = generate(
        model,
        tokenizer,
        tokens,
        codec,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        on_text=on_text,
        held=cache,
        on_cache=on_cache,
    )
    text = torch.cat([tokens, torch.tensor([result.new_tokens], dtype=tokens.dtype, device=tokens.device)], dim=1)
    cache.save(folder, text)
    cache.close()
    if resumed.n_tokens:  # the answer is out: nobody waits for this
        resumed = replace(resumed, reading_seconds=reading_seconds(model, tokens[:, : resumed.n_tokens]))
    return result, resumed


def next_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    chat: bool | None = None,
    before: Int[Tensor, "1 n"] | None = None,
) -> Int[Tensor, "1 t"]:
    """Token ids of a further message: what the chat template puts after an answered one, or the text as it is.

    `before` are the tokens so far. What the template closes an answer with comes first, as far as they do not end in it
    already: an answer that was cut has no mark of its end, and one that was not has no more than the mark.
    """
    if chat is False or not getattr(tokenizer, "chat_template", None):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False, truncation=False, verbose=False)[
            "input_ids"
        ]
    first = prompt_tokens(tokenizer, prompt, chat)
    answered, other = ([_USER, {"role": "assistant", "content": answer}] for answer in ("y", "Z"))
    closed, beside = (_templated(tokenizer, messages, asks=False) for messages in (answered, other))
    whole = _templated(tokenizer, [*answered, {"role": "user", "content": prompt}], asks=True)
    if whole[: len(closed)] != closed:
        return first  # a template that looks back: the message stands as a first one would
    closing = _common_end(closed, beside)
    ids = [] if before is None else before[0, -len(closing) - 1 :].tolist()
    there = next(n for n in range(len(closing), -1, -1) if n == 0 or ids[-n:] == closing[:n])
    rest = closing[there:] if before is not None else []
    return torch.tensor([rest + whole[len(closed) :]], device=HOST)


_USER: dict[str, str] = {"role": "user", "content": "x"}


def _common_end(a: list[int], b: list[int]) -> list[int]:
    """The longest list that both end in."""
    n = next((i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), min(len(a), len(b)))
    return a[len(a) - n :]


def _templated(tokenizer: Any, messages: list[Any], asks: bool) -> list[int]:
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=True)
    return list(made["input_ids"])
