"""Texts drawn from a model, several at a time, each from a generator of its own on the host.

    token = first v with  Σ_{w ≤ v} p(w) > u,      p = softmax(logits / temperature),  u uniform in [0, 1)

One number a row and step is all that is drawn, so the same seeds give the same texts on every device, up to the
rounding of the model's own logits; transformers' own sampling draws on the device, for the whole batch at once.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.modeling_utils import PreTrainedModel

from karhunen.device import HOST
from karhunen.hf.cache import dense_cache
from karhunen.hf.probe import cache_argument, input_device

OnStep = Callable[[int], None]
"""Told how many steps are done."""


def drawn(p: Float[Tensor, "b v"], u: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The token of each row whose share of [0, 1) holds that row's number; never one of probability 0."""
    along = p.double().cumsum(-1)
    chosen = torch.searchsorted(along, (u.double() * along[:, -1])[:, None], right=True)[:, 0]
    return torch.minimum(chosen, (along < along[:, -1:]).sum(-1))


def continued(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    seeds: Sequence[int],
    *,
    pad: int,
    temperature: float = 1.0,
    on_step: OnStep | None = None,
) -> list[list[int]]:
    """Each prompt and `n_tokens` more. A text's end is not drawn, so that each has its length."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=HOST)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=HOST)
    device = input_device(model)
    chooser = _Chooser(seeds, temperature, on_step)
    out: Any = cast("Any", model).generate(
        ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=n_tokens,
        min_new_tokens=n_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,  # the model's own distribution, whatever its settings make of it
        no_repeat_ngram_size=0,
        pad_token_id=pad,
        logits_processor=LogitsProcessorList([chooser]),
        **{cache_argument(model): dense_cache(model)},
    )
    return [row[longest - len(p) :].tolist() for row, p in zip(out.cpu(), prompts, strict=True)]


@final
class _Chooser(LogitsProcessor):
    """Leaves each row one token to choose: the drawn one."""

    def __init__(self, seeds: Sequence[int], temperature: float, on_step: OnStep | None) -> None:
        self.generators = [torch.Generator(HOST).manual_seed(seed) for seed in seeds]
        self.temperature = temperature
        self.on_step = on_step
        self.n_steps = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:  # names are those of the library
        """Scores of which one of each row is finite."""
        u = torch.stack([torch.rand((), generator=g, dtype=torch.float64, device=HOST) for g in self.generators])
        chosen = drawn((scores.float().cpu() / self.temperature).softmax(-1), u)
        self.n_steps += 1
        if self.on_step is not None:
            self.on_step(self.n_steps)
        only = torch.full_like(scores, -torch.inf)
        return only.scatter(-1, chosen[:, None].to(scores.device), 0.0)
