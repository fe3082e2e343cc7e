"""The text as steps: so many sequences through the model forward, then some of them one by one backward."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.calibration.gathering import Gathering
from karhunen.calibration.gradients import measure_gradients
from karhunen.hf.capture import capturing
from karhunen.hf.gradients import NEAR_TOKENS, SINK_TOKENS
from karhunen.statistics.need import Need

GRADIENT_TOKENS = 6144  # gradients are measured on the first this many tokens: a backward pass costs several forwards
BACKWARD_FORWARDS = 4  # what the gradients of a sequence cost, in forwards: for the progress told, nothing else


@final
@dataclass(frozen=True)
class Step:
    """Sequences of one length that run together. `seed` of a backward pass draws its outcomes; None is a forward."""

    tokens: Int[Tensor, "b t"]
    seed: int | None = None

    @property
    def cost(self) -> int:
        """In tokens of a forward."""
        return self.tokens.numel() * (1 if self.seed is None else BACKWARD_FORWARDS)

    def run(self, model: nn.Module, gathering: Gathering) -> None:
        """Run the model and add what it shows."""
        plan = gathering.plan
        if self.seed is None:
            with capturing(model, gathering, gathering.read_again) as forward:
                forward(self.tokens, None)
        else:
            needs = {layer: plan.gradient_needs_of(layer) for layer in plan.layers}
            gathering.add_gradients(measure_gradients(model, self.tokens[0], needs, plan.rotaries, self.seed))


def min_gradient_tokens(needs: Iterable[Need]) -> int:
    """Of a sequence: in shorter ones few tokens are read from afar. 0 without gradients."""
    near = [need.near_tokens for need in needs if need.kind == "gradients"]
    return max(near) + SINK_TOKENS + NEAR_TOKENS + SINK_TOKENS if near else 0


def steps_of(pieces: list[Int[Tensor, " _"]], batch: int, min_tokens: int) -> list[Step]:
    """Neighbouring sequences of one length, at most `batch` together; then those of the backward pass, of `min_tokens`
    or more, none if that is 0."""
    runs: list[list[Tensor]] = []
    for piece in pieces:
        if runs and len(runs[-1]) < batch and len(runs[-1][0]) == len(piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    chosen = gradient_pieces(pieces, min_tokens) if min_tokens else []
    return [
        *(Step(torch.stack(run)) for run in runs),
        *(Step(piece[None], seed=len(pieces) + i) for i, piece in enumerate(chosen)),
    ]


def gradient_pieces(pieces: list[Int[Tensor, " _"]], min_tokens: int) -> list[Int[Tensor, " _"]]:
    """Whole sequences of `min_tokens` or more, spread evenly: GRADIENT_TOKENS together, or half of the text if
    it is short; at least one, and none only if there is none of that length."""
    pieces = [piece for piece in pieces if len(piece) >= min_tokens]
    if not pieces:
        return []
    n_tokens = min(GRADIENT_TOKENS, sum(len(piece) for piece in pieces) / 2)
    n_wanted = max(1, round(n_tokens / max(len(piece) for piece in pieces)))
    stride = max(1, len(pieces) // n_wanted)
    return pieces[::stride][:n_wanted]
