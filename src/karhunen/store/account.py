"""Bytes by kind, measured from tensors that exist.

ratio = bytes of the uncompressed cache in the model's dtype / bytes held
bits per element = 8 · bytes held / cached scalars
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True)
class Account:
    """Bytes held for some tokens. `dense` is what the uncompressed cache of the same tokens takes in the model's dtype;
    `coded_dense` the part of it that is now coded; `exceptions` the part of `exact` that is held beside codes;
    `refinements` the part of `codes` that not every token has."""

    codes: int = 0
    side: int = 0
    exact: int = 0
    dense: int = 0
    coded_dense: int = 0
    n_elements: int = 0
    n_coded_elements: int = 0
    exceptions: int = 0
    refinements: int = 0

    def __add__(self, other: "Account") -> "Account":
        return Account(
            self.codes + other.codes,
            self.side + other.side,
            self.exact + other.exact,
            self.dense + other.dense,
            self.coded_dense + other.coded_dense,
            self.n_elements + other.n_elements,
            self.n_coded_elements + other.n_coded_elements,
            self.exceptions + other.exceptions,
            self.refinements + other.refinements,
        )

    @property
    def held(self) -> int:
        """All bytes held."""
        return self.codes + self.side + self.exact

    @property
    def ratio(self) -> float:
        """Uncompressed over held; 1 for an empty cache."""
        return self.dense / self.held if self.held else 1.0

    @property
    def bits_per_element(self) -> float:
        """Bits held per cached scalar, exact tokens included."""
        return 8 * self.held / self.n_elements if self.n_elements else 0.0

    @property
    def coded(self) -> int:
        """Bytes of the coded tokens: codes, scales and gains, and those of them that are held exact as well."""
        return self.codes + self.side + self.exceptions

    @property
    def coded_bits_per_element(self) -> float:
        """Bits per scalar of the coded tokens alone; 0 if none is coded."""
        return 8 * self.coded / self.n_coded_elements if self.n_coded_elements else 0.0

    @property
    def coded_ratio(self) -> float:
        """Uncompressed over held, for the coded tokens alone; 1 if none is coded."""
        return self.coded_dense / self.coded if self.coded else 1.0


def accounted(held: Mapping[str, Tensor], dense_like: Sequence[Tensor], n_tokens: int, n_coded: int) -> Account:
    """Of the tensors `held`, whose names start with their kind; `dense_like` `[b h t d]`, one for keys and one for
    values, say what `n_tokens` tokens would take uncompressed, `n_coded` of which are coded."""
    size: dict[str, int] = dict.fromkeys(("codes", "side", "exact"), 0)
    for name, tensor in held.items():
        size[name.split(".")[0]] += tensor.nbytes
    exceptions = sum(tensor.nbytes for name, tensor in held.items() if name.startswith("exact.exceptions."))
    refinements = sum(tensor.nbytes for name, tensor in held.items() if name.startswith("codes.refined."))
    dense = elements = coded_elements = 0
    for x in dense_like:
        b, h, _, d = x.shape
        elements += b * h * d * n_tokens
        coded_elements += b * h * d * n_coded
        dense += b * h * d * n_tokens * x.itemsize
    coded_dense = dense * n_coded // n_tokens if n_tokens else 0
    parts = (size["codes"], size["side"], size["exact"])
    return Account(*parts, dense, coded_dense, elements, coded_elements, exceptions, refinements)
