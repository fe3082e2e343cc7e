"""What regresses the dense attention output on the coded one: sums that add up over texts and machines.

gram = Σ_m a′_mᵀ a′_m,   cross = Σ_m a′_mᵀ a_m
W_O′ = (E[a′ᵀa′] + λI)⁻¹ E[a′ᵀa] W_O

Source: SPECTRA (arXiv:2608.07915), the W_O correction; written out as least squares over the pre-W_O vectors, a dense
and a′ from coded keys and values.
Here: λ is `ridge` times the mean eigenvalue, and what it pulls towards may be W_O itself, so that directions the text
never used stay as they are; the paper's formula pulls towards zero.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True)
class OutputPairs:
    """Second moments of the pre-W_O vectors of one layer, all query heads side by side, float64."""

    count: int
    gram: Float[Tensor, "n n"]
    cross: Float[Tensor, "n n"]
    dense: Float[Tensor, "n n"]

    @classmethod
    def of(cls, coded: Float[Tensor, "m n"], dense: Float[Tensor, "m n"]) -> "OutputPairs":
        """Of rows of coded and of dense outputs of the same queries."""
        coded, dense = coded.double(), dense.double()
        return cls(coded.shape[0], coded.mT @ coded, coded.mT @ dense, dense.mT @ dense)

    def __add__(self, other: "OutputPairs") -> "OutputPairs":
        return OutputPairs(
            self.count + other.count, self.gram + other.gram, self.cross + other.cross, self.dense + other.dense
        )

    def error(self, corrected: Float[Tensor, "hidden n"], weight: Float[Tensor, "hidden n"]) -> float:
        """Σ ‖a′ W′ − a W‖² ÷ Σ ‖a W‖² of the rows counted; weights as linear layers store them, [outputs, inputs]."""
        new, old = corrected.double().mT, weight.double().mT
        moved = _energy(new, self.gram) - 2 * (new * (self.cross @ old)).sum() + _energy(old, self.dense)
        return float(moved / _energy(old, self.dense))


def corrected_weight(
    weight: Float[Tensor, "hidden n"], pairs: OutputPairs, ridge: float = 1e-3, towards_weight: bool = True
) -> Float[Tensor, "hidden n"]:
    """W_O′ as a linear layer stores it, in the dtype of `weight`; ValueError for a ridge that is not positive."""
    if not ridge > 0:
        raise ValueError(f"ridge={ridge} leaves unused directions undetermined; use a positive one, such as 1e-3")
    old = weight.double().mT
    level = ridge * pairs.gram.diagonal().mean()
    target = pairs.cross @ old + (level * old if towards_weight else 0)
    new = torch.linalg.solve(pairs.gram + level * torch.eye(len(old), dtype=torch.float64, device=old.device), target)
    return new.mT.to(weight.dtype).contiguous()


RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


def best_corrected_weight(
    weight: Float[Tensor, "hidden n"], pairs: OutputPairs, held_out: OutputPairs
) -> Float[Tensor, "hidden n"]:
    """The correction at the ridge that serves `held_out` text best; W_O itself where none does better than it."""
    tried = [weight, *(corrected_weight(weight, pairs, ridge) for ridge in RIDGES)]
    return min(tried, key=lambda new: held_out.error(new, weight))


def _energy(weight: Float[Tensor, "n hidden"], second: Float[Tensor, "n n"]) -> Tensor:
    return (weight * (second @ weight)).sum()
