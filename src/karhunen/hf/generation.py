"""Continue a prompt, token by token, from a compressed cache or from the uncompressed one.

prompt ─▶ chat template ─▶ exact prefill ─▶ steps that read the cache ─▶ text as it comes, then the account
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, cast, final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.modeling_utils import PreTrainedModel

from karhunen.codec import Codec
from karhunen.hf.cache import CompressedCache, dense_cache
from karhunen.hf.probe import cache_argument, input_device, text_config
from karhunen.store.report import Report

OnText = Callable[[str], None]
OnCache = Callable[[CompressedCache], None]


@final
@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else drawn; `top_k=0` and `top_p=1` keep all."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}: "
                "use temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} is no seed; use 0 to 2^63 - 1")

    def arguments(self) -> dict[str, Any]:
        """For transformers' `generate`; what the model's own settings say of sampling is overruled."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "num_beams": 1}
        top_k = self.top_k or None
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": top_k, "num_beams": 1}


@final
@dataclass(frozen=True)
class Generation:
    """What came out. `report` says what the compressed cache held; None where none was used. A step's seconds are the
    median over the steps."""

    text: str
    n_prompt_tokens: int
    n_new_tokens: int
    prefill_seconds: float
    seconds_per_step: float
    report: Report | None
    new_tokens: tuple[int, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Of a usual step after the prefill; 0 if there was none."""
        return 1 / self.seconds_per_step if self.seconds_per_step > 0 else 0.0


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool | None = None) -> Int[Tensor, "1 t"]:
    """Token ids of a prompt; `chat` wraps it as a user's message, by default where the tokenizer has a template."""
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise ValueError("this model has no chat template; leave `chat` out")
    if chat is False or not has_template:
        return tokenizer(prompt, return_tensors="pt", truncation=False, verbose=False)["input_ids"]
    message: list[Any] = [{"role": "user", "content": prompt}]
    tokens = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return cast("Any", tokens)["input_ids"]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Int[Tensor, "1 t"],
    codec: Codec | None = None,
    *,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    on_text: OnText | None = None,
    exact_dtype: torch.dtype | None = None,
    held: CompressedCache | None = None,
    on_cache: OnCache | None = None,
) -> Generation:
    """Continue `tokens` from the cache of `codec`, or from transformers' own; `on_text` receives text as it comes.
    `held` is a cache that has read the first of them, and goes on to hold the others. `on_cache` is shown a compressed
    cache before the model runs.

    ValueError if the prompt does not fit the model's positions, or the codec was made for another model.
    """
    sampling = sampling or Sampling()
    n_prompt, room = tokens.shape[1], getattr(text_config(model), "max_position_embeddings", None)
    if room is not None and n_prompt + max_new_tokens > room:
        raise ValueError(
            f"a prompt of {n_prompt} tokens and {max_new_tokens} new ones do not fit the model's {room} positions; "
            "shorten the prompt or ask for fewer"
        )
    if held is not None:
        cache = held
    else:
        cache = dense_cache(model) if codec is None else CompressedCache(model, codec, exact_dtype)
    if on_cache is not None and isinstance(cache, CompressedCache):
        on_cache(cache)
    streamer = _Clocked(tokenizer, on_text)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    device = input_device(model)
    output: Any = cast("Any", model).generate(
        tokens.to(device),
        attention_mask=torch.ones_like(tokens).to(device),
        streamer=streamer,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        **{cache_argument(model): cache},
        **sampling.arguments(),
    )
    new = output[0, n_prompt:]
    report = cache.report() if isinstance(cache, CompressedCache) else None
    if isinstance(cache, CompressedCache) and held is None:
        cache.close()
    text = cast("str", tokenizer.decode(new, skip_special_tokens=True))
    seconds = streamer.prefill_seconds, streamer.seconds_per_step
    return Generation(text, n_prompt, len(new), *seconds, report, tuple(new.tolist()))


@final
class _Clocked(TextStreamer):
    """Hands finished words on, and notes when the prompt went in and when each token came out."""

    def __init__(self, tokenizer: Any, on_text: OnText | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """The prompt at first, then each token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Words that no later token changes."""
        if self.on_text is not None:
            self.on_text(text)

    @property
    def prefill_seconds(self) -> float:
        """From the prompt to the first token."""
        return self.times[1] - self.times[0] if len(self.times) > 1 else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Median over the tokens after the first: the first steps load kernels."""
        return median(after - before for before, after in pairwise(self.times[1:])) if len(self.times) > 2 else 0.0
