"""Distortion of byte codes over that of the Gaussian rate-distortion function, by bits per coefficient of a head.

Heads of a real model in the recipe's own transform; tables trained on three quarters of the calibration samples and
measured on the rest. The medians are what the table LOSS of quantizers/byte_vq.py rounds. A Gaussian is the hardest
source of its variance, so the function is a unit and no floor: what is far from Gaussian may lie below 1.

    python benchmarks/byte_efficiency.py --statistics FOLDER --json results/measured/byte_efficiency-smollm2.json
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from karhunen.allocation.units import distortion_bound
from karhunen.allocation.water_filling import ideal_bits
from karhunen.evaluation.results.provenance import provenance
from karhunen.fitting import samples_and_variances
from karhunen.quantizers.base import QuantizerData
from karhunen.quantizers.byte_vq import BYTE_BITS, ByteVQ
from karhunen.recipes import make
from karhunen.statistics.artifact import load_statistics

BITS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)


def main() -> None:
    """Measure some layers, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--statistics", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=5, help="so many layers, evenly spread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    statistics = load_statistics(options.statistics)
    layers = sorted(statistics.layers)
    chosen = layers[:: max(1, len(layers) // options.layers)][: options.layers]
    records = [
        {"layer": layer, "slot": slot, "bits": bits, "loss": loss}
        for layer in chosen
        for slot in ("key", "value")
        for samples, variance in [samples_and_variances(make("karhunen"), statistics, layer, slot)]
        for bits in BITS
        for loss in losses(samples, variance, bits)
    ]
    print("bits per coefficient   median   least    most   (distortion over the Gaussian function)")
    for bits in BITS:
        found = [record["loss"] for record in records if record["bits"] == bits]
        print(f"{bits:20.1f} {median(found):8.2f} {min(found):7.2f} {max(found):7.2f}", flush=True)
    if options.json:
        body = {"made": asdict(provenance()), "model": statistics.model.architecture, "records": records}
        options.json.write_text(json.dumps(body, indent=1))


def losses(samples: Tensor, variance: Tensor, bits: float) -> list[float]:
    """Held-out distortion over the Gaussian function, one per head."""
    g, c = variance.shape
    n_bytes = round(bits * c / BYTE_BITS)
    ones = torch.ones(c, dtype=torch.float64)
    rates = torch.stack([ideal_bits(v, ones, 0 * ones, 24 * ones, float(BYTE_BITS * n_bytes)) for v in variance])
    n = samples.shape[1] * 3 // 4
    seen, held_out = samples[:, :n], samples[:, n:]
    quantizer = ByteVQ().fit(QuantizerData(rates, None, seen))
    error = quantizer.decode(quantizer.encode(held_out[None]))[0] - held_out
    found = error.double().square().mean(1).sum(-1)
    bound = [distortion_bound(v, BYTE_BITS, n_bytes)[-1] for v in held_out.double().square().mean(1)]
    return [float(found[head] / bound[head]) for head in range(g)]


if __name__ == "__main__":
    main()
