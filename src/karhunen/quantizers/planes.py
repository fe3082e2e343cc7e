"""From planes (which coefficients share a symbol, in which stage, at how many bits) to trained tables.

stage 0 is trained on the coefficients, stage k on what the stages before it left over
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.device import HOST
from karhunen.kernels.byte_tables import Lookups
from karhunen.quantizers.additive import as_integers, sums, train_additive
from karhunen.quantizers.base import QuantizerData
from karhunen.quantizers.byte_quantizer import ByteQuantizer
from karhunen.quantizers.gains import GainKind, split_gain
from karhunen.quantizers.kmeans import kmeans
from karhunen.quantizers.nearest import nearest
from karhunen.quantizers.vector import VectorQuantizer

EntryKind = Literal["float16", "float8_e5m2"]
ENTRY_KINDS = ("float16", "float8_e5m2")

ENTRY_DTYPES = {"float16": torch.float16, "float8_e5m2": torch.float8_e5m2}
BATCH_PLANES = 48  # codebooks trained at a time; bounds the distance table
FLOAT8_TOP = 8.0  # a float8 table is scaled so that its largest entry is this, in the middle of e5m2's range


@final
@dataclass(frozen=True)
class Plane:
    """One symbol: `coordinates` of head group `group`, `bits` wide, refining the planes of lower `stage`."""

    group: int
    coordinates: tuple[int, ...]
    bits: int
    stage: int = 0


@final
@dataclass(frozen=True)
class Training:
    """How tables are trained and stored. `gaussian_share` Gaussian vectors of the same spectrum are mixed in for each
    real one: tables then fit text of another kind better."""

    n_iterations: int
    seed: int
    max_samples: int
    gaussian_share: float = 0.0
    entries: EntryKind = "float16"


def train(planes: Sequence[Plane], data: QuantizerData, gain: GainKind, how: Training) -> VectorQuantizer:
    """Codebooks of all planes, in order."""
    g, c = data.rates.shape
    rest = _training_samples(data, gain, how)
    tables: dict[int, Tensor] = {}
    device = rest.device
    scales = torch.ones(len(planes), device=device)
    for batch in _batches(planes):
        books = _train_batch([planes[j] for j in batch], rest, how)
        for j, (stored, scale) in zip(batch, books, strict=True):
            tables[j], scales[j] = stored, scale
    empty = torch.empty(0, dtype=ENTRY_DTYPES[how.entries], device=device)
    in_order = [tables[j] for j in range(len(planes))]  # none where the budget leaves a side no byte
    return VectorQuantizer(
        g=g,
        c=c,
        gain=gain,
        plane_group=torch.tensor([plane.group for plane in planes], dtype=torch.int64, device=device),
        plane_stage=torch.tensor([plane.stage for plane in planes], dtype=torch.int64, device=device),
        plane_bits=torch.tensor([plane.bits for plane in planes], dtype=torch.int64, device=device),
        plane_size=torch.tensor([len(plane.coordinates) for plane in planes], dtype=torch.int64, device=device),
        coordinates=torch.tensor([i for plane in planes for i in plane.coordinates], dtype=torch.int64, device=device),
        entries=torch.cat([empty, *(t.flatten() for t in in_order)]),
        scale=scales,
    )


def train_bytes(
    planes: Sequence[Plane], data: QuantizerData, gain: GainKind, how: Training, index_bits: tuple[int, int]
) -> ByteQuantizer:
    """Tables of look-ups for all planes, in order; every plane is a byte."""
    g, c = data.rates.shape
    rest = _training_samples(data, gain, how)
    n_stages = 1 + max((plane.stage for plane in planes), default=0)
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for batch in _batches(planes):
        mine = [planes[j] for j in batch]
        x, sizes = _side_by_side(mine, rest)
        if index_bits[1]:
            rows = train_additive(x, index_bits, sizes, how.n_iterations, how.seed)
            low, high, scale = as_integers(*rows, sums(rows, index_bits))
        else:
            entries = kmeans(x, 256, how.n_iterations, how.seed)
            low, high, scale = as_integers(entries, None, entries)
        if n_stages > 1:
            values = Lookups(low.transpose(0, 1).flatten(1), high.transpose(0, 1).flatten(1), scale.flatten()).entries()
            values = values.unflatten(1, (len(batch), -1)).transpose(0, 1)
            _take_away(mine, rest, values, nearest(x, values, sizes)[0])
        for row, (j, size) in enumerate(zip(batch, sizes, strict=True)):
            found[j] = low[row, :, :size], high[row, :, :size], scale[row, :size]
    order = range(len(planes))
    device = rest.device
    empty = [torch.empty(2**bits if bits else 0, 0, dtype=torch.int8, device=device) for bits in index_bits]
    return ByteQuantizer(
        g=g,
        c=c,
        gain=gain,
        plane_group=torch.tensor([plane.group for plane in planes], dtype=torch.int64, device=device),
        plane_size=torch.tensor([len(plane.coordinates) for plane in planes], dtype=torch.int64, device=device),
        coordinates=torch.tensor([i for plane in planes for i in plane.coordinates], dtype=torch.int64, device=device),
        low=torch.cat([empty[0], *(found[j][0] for j in order)], dim=1),
        high=torch.cat([empty[1], *(found[j][1] for j in order)], dim=1),
        scale=torch.cat([torch.empty(0, device=device), *(found[j][2] for j in order)]),
    )


def _training_samples(data: QuantizerData, gain: GainKind, how: Training) -> Float[Tensor, "g n c"]:
    samples = data.require_samples()
    samples = samples[:, :: max(1, -(-samples.shape[1] // how.max_samples))].double()
    if gain != "none":
        samples = split_gain(samples[None], gain)[0][0]
    return torch.cat([samples, _gaussian(samples, how)], dim=1).float()


def _side_by_side(planes: list[Plane], rest: Float[Tensor, "g n c"]) -> tuple[Float[Tensor, "s n w"], list[int]]:
    """The coefficients of each plane, zeros behind those of the narrower ones, and how many are its own."""
    sizes = [len(plane.coordinates) for plane in planes]
    x = rest.new_zeros(len(planes), rest.shape[1], max(sizes))
    for row, plane in enumerate(planes):
        x[row, :, : sizes[row]] = rest[plane.group][:, list(plane.coordinates)]
    return x, sizes


def _take_away(planes: list[Plane], rest: Float[Tensor, "g n c"], values: Tensor, chosen: Tensor) -> None:
    for row, plane in enumerate(planes):
        rest[plane.group][:, list(plane.coordinates)] -= values[row, chosen[row], : len(plane.coordinates)]


def _gaussian(samples: Float[Tensor, "g n c"], how: Training) -> Float[Tensor, "g m c"]:
    n = round(samples.shape[1] * how.gaussian_share)
    generator = torch.Generator(HOST).manual_seed(how.seed)
    shape = samples.shape[0], n, samples.shape[2]
    normal = torch.randn(shape, generator=generator, dtype=samples.dtype, device=HOST)
    return normal.to(samples.device) * samples.square().mean(1, keepdim=True).sqrt()


def _train_batch(planes: list[Plane], rest: Float[Tensor, "g n c"], how: Training) -> list[tuple[Tensor, float]]:
    """Trains planes of equal bits on `rest` and takes from it what they code."""
    x, sizes = _side_by_side(planes, rest)
    books = kmeans(x, 2 ** planes[0].bits, how.n_iterations, how.seed)
    stored, scales = _stored(books, how.entries)
    values = stored.float() * scales[:, None, None]
    chosen, _ = nearest(x, values, sizes)
    _take_away(planes, rest, values, chosen)
    return [(stored[r, :, : len(p.coordinates)], float(scales[r])) for r, p in enumerate(planes)]


def _stored(tables: Float[Tensor, "s e w"], kind: EntryKind) -> tuple[Tensor, Float[Tensor, " s"]]:
    if kind == "float8_e5m2":
        scale = tables.abs().amax((-2, -1)).clamp_min(1e-30) / FLOAT8_TOP
        return (tables / scale[:, None, None]).to(torch.float8_e5m2), scale
    return tables.clamp(-6e4, 6e4).to(torch.float16), tables.new_ones(tables.shape[0])


def _batches(planes: Sequence[Plane]) -> list[list[int]]:
    """Planes of one stage and width in bits, of similar size; stages in order."""
    order = sorted(range(len(planes)), key=lambda j: (planes[j].stage, planes[j].bits, len(planes[j].coordinates), j))
    batches: list[list[int]] = []
    for j in order:
        last = batches[-1] if batches else []
        alike = last and (planes[last[0]].stage, planes[last[0]].bits) == (planes[j].stage, planes[j].bits)
        if alike and len(last) < BATCH_PLANES:
            last.append(j)
        else:
            batches.append([j])
    return batches
