"""Closeness by the size of what is compared.

A number that many terms cancelled to is as wrong as the terms are large, on one processor more than on another: sums
are taken in other orders with other instruction sets and other numbers of threads. So a difference is judged against
the largest number of the tensor it stands in, never against a fixed one.
"""

import torch
from torch import Tensor

SUM = 1e-5
"""Of float32 sums of up to some hundred terms in another order: 2⁻²⁴, by the root of their number, by ten."""
LAYERS = 1e-4
"""Of what a forward or backward pass of two or three layers makes of such sums: softmaxes and norms carry the absolute
error of a score on as a relative one."""
DOUBLE = 1e-12
"""Of float64 sums in another order."""


def assert_near(actual: Tensor, expected: Tensor, share: float) -> None:
    """No difference is above `share` of the largest expected number; NaN and infinity are as expected or not at all."""
    actual, expected = actual.detach(), expected.detach()
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    known = expected.isfinite()
    size = float(expected[known].abs().max()) if bool(known.any()) else 0.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0.0, atol=share * size, equal_nan=True)
