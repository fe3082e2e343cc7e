"""Rotations that know no data: they spread an outlier over all coordinates.

    Hadamard:  y = x H,   H orthogonal with entries near ±1/√d
    random:    y = x Q,   Q from the QR decomposition of a Gaussian matrix, Haar distributed

Source: QuaRot (arXiv:2404.00456) §3; TurboQuant (arXiv:2504.19874) §3.
Here:   any size. d = 2^k · m takes the Kronecker product of Sylvester's matrix and an m-point Hartley matrix,
        so that head sizes 80, 96 or 112 need no padding.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.device import HOST
from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec


@final
@dataclass(frozen=True)
class Hadamard(TransformSpec):
    """The Hadamard rotation of each head group."""

    def fit(self, data: TransformData) -> AffineMap:
        """The same matrix for every group."""
        return _rotation(hadamard_matrix(data.d), data)


@final
@dataclass(frozen=True)
class RandomRotation(TransformSpec):
    """A Haar-distributed rotation, one for each head group, from a seed."""

    seed: int = 0

    def fit(self, data: TransformData) -> AffineMap:
        """One matrix per group."""
        generator = torch.Generator(HOST).manual_seed(self.seed)
        normal = torch.randn(data.g, data.d, data.d, generator=generator, dtype=torch.float64, device=HOST)
        q, r = torch.linalg.qr(normal)
        return _rotation(q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None], data)


def hadamard_matrix(d: int) -> Float[Tensor, "d d"]:
    """Orthogonal d × d matrix of flat entries, float64; symmetric ±1/√d where d is a power of two."""
    odd = d
    while odd % 2 == 0:
        odd //= 2
    angle = 2 * math.pi / odd * torch.arange(odd, device=HOST).outer(torch.arange(odd, device=HOST)).double()
    matrix = (angle.cos() + angle.sin()) / math.sqrt(odd)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device=HOST) / math.sqrt(2)
    while matrix.shape[0] < d:
        matrix = torch.kron(two, matrix)
    return matrix


def _rotation(matrix: Tensor, data: TransformData) -> AffineMap:
    matrix = matrix.to(data.device).expand(data.g, data.d, data.d).float()
    return AffineMap(matrix.new_zeros(data.g, data.d), matrix.contiguous(), matrix.mT.contiguous())
