"""What a code could still gain over one byte per group: a trellis, earlier tokens, an entropy coder.

    trellis:         coefficients of whole water-filled widths, each from one of 4 interleaved subsets of a codebook of
                     twice its size; a path through 8 or 256 states says which subset (Marcellin and Fischer, 1990)
    earlier tokens:  a coefficient predicted from those of the same place in the tokens before it, as if these were
                     known exactly: ½ log2 (variance / variance of the residual) bits, and no code gains more
    entropy coder:   each plane's bytes by their frequencies in calibration text: the mean of −log2 frequency, which
                     an arithmetic coder reaches to within a fraction of a percent

The first is measured as `byte_efficiency.py` measures byte codes (tables trained on three quarters of the calibration
samples, distortion on the rest over what a Gaussian of the same variances would need at that rate). Real coefficients
are not Gaussian, so that is a common unit and no floor: rows may lie below 1. The others are measured on prose and code
that nothing was fitted to.

    python benchmarks/limits.py --statistics FOLDER --json results/measured/limits-smollm2.json
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from byte_efficiency import losses
from numpy.typing import NDArray
from torch import Tensor

from karhunen.allocation.rounding import to_integers
from karhunen.allocation.units import distortion_bound
from karhunen.allocation.water_filling import ideal_bits
from karhunen.calibration.texts import calibration_text
from karhunen.codec import Codec
from karhunen.evaluation.documents import default_documents, encode
from karhunen.evaluation.results.composition import coefficient_bits
from karhunen.evaluation.results.provenance import provenance
from karhunen.evaluation.scores.attention_error import capture
from karhunen.fitting import fit, samples_and_variances
from karhunen.hf.embedded import load
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics
from karhunen.statistics.need import SLOTS, Slot

BITS = (1.0, 2.0, 4.0)
PARITY = {8: (0o13, 0o04), 256: (0o515, 0o362)}  # h0, h1 of Ungerboeck's one-dimensional codes (1982, table I)
ROUNDS = 6
LAGS = 4
SEEN = (8, 2048)  # sequences of calibration text, whose bytes give the frequencies


@dataclass(frozen=True)
class Trellis:
    """From each state two branches: the subset of each, and where it leads."""

    subset: NDArray[np.int64]  # [states 2]
    to: NDArray[np.int64]  # [states 2]


def trellis(n_states: int) -> Trellis:
    """The systematic feedback encoder of the parity-check polynomials: z0 is the state's lowest bit, z1 the input."""
    h0, h1 = PARITY[n_states]
    v = n_states.bit_length() - 1
    subset, to = np.zeros((n_states, 2), np.int64), np.zeros((n_states, 2), np.int64)
    for state in range(n_states):
        z0 = state & 1
        for z1 in (0, 1):
            bits = [(state >> i & 1 if i < v else 0) ^ (z1 & h1 >> i) & 1 ^ (z0 & h0 >> i) & 1 for i in range(1, v + 1)]
            subset[state, z1] = 2 * z1 + z0
            to[state, z1] = sum(bit << i for i, bit in enumerate(bits))
    return Trellis(subset, to)


def searched(x: NDArray[np.float64], books: list[NDArray[np.float64]], path: Trellis) -> NDArray[np.int64]:
    """Viterbi from state 0: the point of each coefficient's codebook, for each token of `x` [n c]."""
    n, n_states = len(x), len(path.to)
    cost = np.full((n, n_states), np.inf)
    cost[:, 0] = 0
    came: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    sources = [np.argwhere(path.to == state) for state in range(n_states)]  # two branches lead to each
    before = np.array([s[:, 0] for s in sources])
    branch = np.array([s[:, 1] for s in sources])
    for i, book in enumerate(books):
        off = np.square(x[:, i, None] - book[None])  # [n points]
        best = np.stack([k + 4 * off[:, k::4].argmin(1) for k in range(4)], axis=1)  # the point, by subset
        least = np.take_along_axis(off, best, axis=1)
        reached = cost[:, before] + least[:, path.subset[before, branch]]  # [n states 2]
        which = reached.argmin(-1)
        cost = np.take_along_axis(reached, which[..., None], axis=-1)[..., 0]
        chosen = np.take_along_axis(best, path.subset[before, branch][np.arange(n_states)[None], which], axis=1)
        came.append((np.take_along_axis(before[None].repeat(n, 0), which[..., None], axis=-1)[..., 0], chosen))
    state, points, rows = cost.argmin(1), np.zeros((n, len(books)), np.int64), np.arange(n)
    for i in reversed(range(len(books))):
        earlier, chosen = came[i]
        points[:, i] = chosen[rows, state]
        state = earlier[rows, state]
    return points


def trellis_losses(samples: Tensor, variance: Tensor, bits: float, n_states: int) -> list[float]:
    """Held-out distortion over the Gaussian function, one per head, with the bytes a byte code would take."""
    found: list[float] = []
    for head, spread in enumerate(variance):
        n_bytes = round(bits * len(spread) / 8)
        ones = torch.ones_like(spread)
        ideal = ideal_bits(spread, ones, 0 * ones, 24 * ones, 8.0 * n_bytes)
        widths = to_integers(ideal, 8 * n_bytes, 12).numpy()
        order = np.argsort(-widths, kind="stable")
        kept = order[widths[order] > 0]
        n = samples.shape[1] * 3 // 4
        seen, held_out = samples[head, :n].double().numpy(), samples[head, n:].double().numpy()
        path = trellis(n_states)
        books = [np.quantile(seen[:, i], (np.arange(2 ** (widths[i] + 1)) + 0.5) / 2 ** (widths[i] + 1)) for i in kept]
        few = seen[:: max(1, len(seen) // 2048)]
        for _ in range(ROUNDS):
            points = searched(few[:, kept], books, path)
            for k, i in enumerate(kept):
                total = np.bincount(points[:, k], few[:, i], len(books[k]))
                count = np.bincount(points[:, k], minlength=len(books[k]))
                books[k] = np.where(count > 0, total / np.maximum(count, 1), books[k])
        points = searched(held_out[:, kept], books, path)
        decoded = np.zeros_like(held_out)
        for k, i in enumerate(kept):
            decoded[:, i] = books[k][points[:, k]]
        error = float(np.square(held_out - decoded).mean(0).sum())
        bound = distortion_bound(torch.from_numpy(np.square(held_out).mean(0)), 8, n_bytes)[-1]
        found.append(error / float(bound))
    return found


def bits_from_before(codec: Codec, model: torch.nn.Module, tokens: Tensor) -> dict[str, float]:
    """Bits per element that LAGS exact earlier tokens would save, mean over all coefficients; none where none is
    spent."""
    captured = capture(model, tokens)
    saved: dict[str, float] = {}
    for slot in SLOTS:
        of_layers: list[float] = []
        for i, layer in codec.layers.items():
            side = layer.side(slot)
            x = captured[i].key if slot == "key" else captured[i].value
            y = side.transform.forward(side.frame.forward(x, torch.arange(x.shape[2])[None], side.rotary, side.mean))[0]
            width = coefficient_bits(side.quantizer, *y.shape[0::2])
            of_layers.append(float(torch.minimum(_prediction_bits(y[:, 4:].double()), width.double()).mean()))
        saved[slot] = mean(of_layers)
    return saved


def _prediction_bits(y: Tensor) -> Tensor:
    """½ log2 of what least squares on the tokens before leaves, half of the tokens fitted and the other half scored."""
    y = y - y.mean(1, keepdim=True)
    past = torch.stack([y[:, LAGS - lag - 1 : y.shape[1] - lag - 1] for lag in range(LAGS)], dim=-1).transpose(1, 2)
    now = y[:, LAGS:].transpose(1, 2)[..., None]  # [g c t 1]
    half = now.shape[2] // 2
    weights = torch.linalg.lstsq(past[:, :, :half], now[:, :, :half]).solution
    left = (now[:, :, half:] - past[:, :, half:] @ weights).square().mean((-2, -1))
    return 0.5 * (now[:, :, half:].square().mean((-2, -1)) / left.clamp_min(1e-30)).log2().clamp_min(0)


def bits_of_a_byte(codec: Codec, model: torch.nn.Module, seen: Tensor, tokens: Tensor) -> dict[str, float]:
    """Mean of −log2 frequency over planes and tokens; frequencies are those of `seen` [n t], one added to each."""
    counts: dict[tuple[int, Slot], NDArray[np.int64]] = {}
    for row in seen:
        for at, planes in _bytes(codec, model, row).items():
            counts.setdefault(at, np.ones((len(planes), 256), np.int64))
            for plane, codes in enumerate(planes):
                counts[at][plane] += np.bincount(codes, minlength=256)
    bits: dict[str, list[float]] = {slot: [] for slot in SLOTS}
    for at, planes in _bytes(codec, model, tokens).items():
        length = -np.log2(counts[at] / counts[at].sum(1, keepdims=True))
        bits[at[1]] += [float(length[plane][codes].mean()) for plane, codes in enumerate(planes)]
    return {slot: mean(found) for slot, found in bits.items()}


def _bytes(codec: Codec, model: torch.nn.Module, tokens: Tensor) -> dict[tuple[int, Slot], NDArray[np.uint8]]:
    captured = capture(model, tokens)
    places = torch.arange(len(tokens))[None]
    return {
        (i, slot): layer.side(slot)
        .encode(captured[i].key if slot == "key" else captured[i].value, places)
        .planes[0]
        .numpy()
        for i, layer in codec.layers.items()
        for slot in SLOTS
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--statistics", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=3, help="so many layers, evenly spread, for the trellis")
    parser.add_argument("--bits", type=float, nargs="+", default=list(BITS), help="a coefficient, for the trellis")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    statistics = load_statistics(given.statistics)
    layers = sorted(statistics.layers)
    chosen = layers[:: max(1, len(layers) // given.layers)][: given.layers]
    records = []
    print("bits per coefficient   bytes   trellis of 8   of 256 states   (over the Gaussian function, median)")
    for bits in given.bits:
        for layer in chosen:
            for slot in SLOTS:
                samples, variance = samples_and_variances(make("karhunen"), statistics, layer, slot)
                row = {"bytes": losses(samples, variance, bits)}
                row |= {f"trellis {s}": trellis_losses(samples, variance, bits, s) for s in PARITY}
                records.append({"layer": layer, "slot": slot, "bits": bits, **row})
        of_bits = [r for r in records if r["bits"] == bits]
        medians = [median(x for r in of_bits for x in r[name]) for name in ("bytes", "trellis 8", "trellis 256")]
        print(f"{bits:20.1f} {medians[0]:7.2f} {medians[1]:14.2f} {medians[2]:15.2f}", flush=True)
    model, tokenizer = load(given.model)
    codec = fit(make("karhunen"), statistics)
    documents = default_documents(
        tokenizer, "development", n_prose=1, n_code=1, n_literature=0, prefill_tokens=2048, scored_tokens=2
    )
    before = {d.name: bits_from_before(codec, model, d.tokens[:2048]) for d in documents}
    for name, saved in before.items():
        print(f"{name}: {LAGS} earlier tokens tell " + ", ".join(f"{v:.3f} bits of a {k}" for k, v in saved.items()))
    ids = torch.tensor(encode(tokenizer, calibration_text())[: SEEN[0] * SEEN[1]]).view(SEEN)
    lengths = {d.name: bits_of_a_byte(codec, model, ids, d.tokens[:2048]) for d in documents}
    for name, found in lengths.items():
        print(f"{name}: an entropy coder takes " + ", ".join(f"{v:.2f} bits of a {k}'s byte" for k, v in found.items()))
    if given.json:
        body = {
            "made": asdict(provenance()),
            "model": given.model,
            "trellis": records,
            "earlier_tokens": before,
            "bits_of_a_byte": lengths,
        }
        given.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
