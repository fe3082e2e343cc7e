"""Coded tokens have classes: all have base bytes, those that are looked at have layers of refinement besides.

    rate_n = b + ½ log₂ s_n,   s_n = mean over queries and heads of a_mn²,   never below the base

An error in token n moves the output by a_mn times as much, so its distortion counts with the square of its weight, and
water-filling over tokens gives it ½ log₂ of that more bits. Decided once, when the token leaves the exact window, by
the queries that read it there: a prompt's last `queries`, each step's own while decoding.

Source: reverse water-filling (water_filling.py), here over tokens; SnapKV (arXiv:2404.14469) observes the same queries
and drops the others' tokens.
Here:   whole layers, as many as the budget has; the line b is set anew by each group of tokens that leaves together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from karhunen.allocation.base import Allocation
from karhunen.allocation.water_filling import WaterFilling
from karhunen.device import HOST
from karhunen.quantizers.base import Quantizer
from karhunen.quantizers.embedded import EmbeddedQuantizer
from karhunen.values import refuse_unless_whole
from karhunen.windows.base import Window
from karhunen.windows.partition import Partition
from karhunen.windows.score import Reads
from karhunen.windows.small_norm import SmallNorm

STEPS = 16  # of a layer: how finely a byte of heat says what a token's refinement is worth
HOTTEST = 255
FLOOR = 1e-30  # of a mean squared weight: unread tokens have a logarithm too


@final
@dataclass(frozen=True)
class Refining(Window):
    """The tokens of `window`, of which those that leave have `mean_layers` of `n_layers` layers on average, a layer
    being `layer_bits` bits an element."""

    window: Window
    n_layers: int
    mean_layers: float
    layer_bits: float = 1.0
    queries: int = 128

    def __post_init__(self) -> None:
        refuse_unless_whole(n_layers=self.n_layers, queries=self.queries)
        if not 1 <= self.n_layers < HOTTEST // STEPS or not 0 < self.mean_layers <= self.n_layers:
            raise ValueError(
                f"a mean of {self.mean_layers} of {self.n_layers} layers: use 1 to {HOTTEST // STEPS - 1} layers, and "
                "a mean above 0 and not above their number"
            )
        if self.queries < 1 or self.layer_bits <= 0:
            raise ValueError(f"queries={self.queries}, layer_bits={self.layer_bits}: use 1 or more, and more than 0")
        if self.window.drops or self.window.reads != "never":
            raise ValueError(f"{type(self.window).__name__} drops tokens or looks at queries; refine SinkRecent")

    @property
    def sink_tokens(self) -> int:
        """As within."""
        return self.window.sink_tokens

    @property
    def exceptions(self) -> SmallNorm | None:
        """As within."""
        return self.window.exceptions

    @property
    def recent_tokens(self) -> int | None:
        """As within."""
        return self.window.recent_tokens

    @property
    def reads(self) -> Reads:
        """Every forward's."""
        return "always"

    @property
    def token_bits(self) -> float:
        """A byte of heat."""
        return 8.0

    def group_tokens(self, granule: int) -> int:
        """As within."""
        return self.window.group_tokens(granule)

    def partition(self, n_tokens: int, granule: int) -> Partition:
        """As within."""
        return self.window.partition(n_tokens, granule)

    def heat(self, scores: Float[Tensor, "b t"], n_before: int, given: Int[Tensor, " b"]) -> UInt8[Tensor, "b t"]:
        """What each token's refinement is worth, in sixteenths of a layer: `classes` of it meets the budget exactly.

        `scores` are mean squared weights, on the host, not a number for tokens that get none (padding, exact ones).
        `n_before` tokens were decided on earlier and were given so many layers together.
        """
        rate = scores.double().clamp_min(FLOOR).log2() / (2 * self.layer_bits)
        b, t = scores.shape
        heat = torch.zeros(b, t, dtype=torch.uint8, device=HOST)
        for row in range(b):
            asks = ~scores[row].isnan()
            worth = rate[row, asks][:, None] - torch.arange(self.n_layers, dtype=rate.dtype, device=HOST)
            due = round(self.mean_layers * (n_before + t)) - int(given[row])
            n = max(0, min(due, worth.numel()))
            order = worth.flatten().argsort(descending=True, stable=True)
            if n == 0:
                continue
            line = worth.flatten()[order[n - 1]]
            classes = torch.bincount(order[:n] // self.n_layers, minlength=len(worth))
            steps = ((rate[row, asks] - line + 1) * STEPS).floor().long()
            steps = steps.maximum(classes * STEPS)
            steps = torch.where(classes < self.n_layers, steps.minimum(classes * STEPS + STEPS - 1), steps)
            heat[row, asks] = steps.clamp(0, HOTTEST).to(torch.uint8)
        return heat

    def classes(self, heat: UInt8[Tensor, "b t"], line: int = 0) -> Int[Tensor, "b t"]:
        """How many layers each token has when the line has risen by `line` sixteenths of a layer."""
        return ((heat.long() - line) // STEPS).clamp(0, self.n_layers)


def check_layers(window: Window, quantizers: Mapping[str, Quantizer]) -> None:
    """ValueError unless the quantizers, by name of their side, have as many layers as the window gives."""
    wanted = window.n_layers if isinstance(window, Refining) else 0
    for name, quantizer in quantizers.items():
        n = len(quantizer.parts) - 1 if isinstance(quantizer, EmbeddedQuantizer) else 0
        if n != wanted:
            raise ValueError(f"its {name}s have {n} layers of refinement, its window gives {wanted}")


def mean_share(window: Window, quantizer: Quantizer) -> float:
    """How many of its symbols a coded token has on average, as a share of all."""
    if not isinstance(window, Refining) or not isinstance(quantizer, EmbeddedQuantizer):
        return 1.0
    base = quantizer.edges[0] / quantizer.edges[-1]
    return base + (1 - base) * window.mean_layers / window.n_layers


@final
@dataclass(frozen=True)
class Shares:
    """How a mean rate is split: bits of the base, layers, and how many of these a token has on average."""

    base_bits: float
    layers: tuple[Allocation, ...] = ()
    mean_layers: float = 0.0
    layer_bits: float = 1.0

    def window(self, window: Window) -> Window:
        """`window` itself where nothing is refined."""
        if not self.layers:
            return window
        return Refining(window, len(self.layers), self.mean_layers, self.layer_bits)


def shares(
    bits: float, progressive: bool, base_bits: float, layer_bits: float, n_layers: int, token_bytes: int | None
) -> Shares:
    """Of `bits` on average the base takes `base_bits`; refinements have the rest. ValueError where nothing is left, or
    more than all layers of all tokens take."""
    if not progressive:
        return Shares(bits)
    if token_bytes is not None:
        raise ValueError(f"token_bytes={token_bytes}: progressive tokens differ in size; say the mean as bits or ratio")
    if n_layers < 1:
        raise ValueError(
            f"layers={n_layers}: a progressive code has 1 layer of refinement or more; use 3, or progressive=false"
        )
    most = base_bits + n_layers * layer_bits
    if not base_bits < bits <= most:
        raise ValueError(
            f"bits={bits:g} is the mean of a base of base_bits={base_bits:g} and {n_layers} layers of "
            f"layer_bits={layer_bits:g}; use more than {base_bits:g} and at most {most:g}, or another base"
        )
    layers = tuple(WaterFilling(layer_bits, "model") for _ in range(n_layers))
    return Shares(base_bits, layers, (bits - base_bits) / layer_bits, layer_bits)
