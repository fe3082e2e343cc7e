"""What calibration measures, where, and the sums so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

from jaxtyping import Int
from torch import Tensor

from karhunen.calibration.host import on_host, with_float64
from karhunen.calibration.measure import measure
from karhunen.hf.capture import Observation
from karhunen.hf.rotary import USE_AS_CACHED, DetectedRotary
from karhunen.statistics.gathered import LayerStatistics
from karhunen.statistics.identity import ModelIdentity
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import OF_READS, OF_WEIGHTS, Need, Statistic
from karhunen.values import fingerprint


@final
@dataclass(frozen=True)
class Plan:
    """What is measured, where, with which rotations."""

    identity: ModelIdentity
    rotaries: Mapping[int, DetectedRotary]
    needs: tuple[Need, ...]
    layers: tuple[int, ...]
    min_tokens: int

    @property
    def skip_tokens(self) -> int:
        """Tokens at the head of a sequence that some need leaves out."""
        return max((need.skip_tokens for need in self.needs), default=0)

    @property
    def gradient_needs(self) -> list[Need]:
        """Those that take a backward pass, as recipes ask for them."""
        return [need for need in self.needs if need.kind == "gradients"]

    def needs_of(self, layer: int) -> list[Need]:
        """What is measured of a layer. Recipes ask of the keys what they ask of the part that turns, which latent
        attention caches as values."""
        found = self.rotaries.get(layer, DetectedRotary())
        exchanged = LayerStatistics(found.key, found.value).turns_in_values
        return [need.exchanged() if exchanged else need for need in self.needs]

    def forward_needs_of(self, layer: int) -> list[Need]:
        """Those that a forward shows."""
        return [need for need in self.needs_of(layer) if need.kind != "gradients"]

    def gradient_needs_of(self, layer: int) -> list[Need]:
        """Those that take a backward pass."""
        return [need for need in self.needs_of(layer) if need.kind == "gradients"]

    def check(self) -> None:
        """ValueError if a need asks for a rotary frame that the model does not have."""
        moving = [need for need in self.needs if need.block_tokens is not None]
        if not moving:
            return
        if noted := [i for i in self.layers if i in self.rotaries and self.rotaries[i].note]:
            raise ValueError(f"layers {noted}: {self.rotaries[noted[0]].note}")
        if not any(found.key or found.value for found in self.rotaries.values()):
            raise ValueError(
                f"{self.identity.architecture} has no RoPE, so {moving[0]} cannot be measured; {USE_AS_CACHED}"
            )

    def fingerprint(self, pieces: list[Int[Tensor, " _"]], batch: int) -> str:
        """Names everything the sums depend on."""
        said = (self.identity, self.needs, self.layers, pieces)
        return fingerprint(said if batch == 1 else (*said, batch))


@final
@dataclass
class Gathering:
    """Sums so far, in the host's memory; as a listener, adds what each layer shows."""

    plan: Plan
    stride: int
    sums: dict[int, LayerStatistics] = field(default_factory=dict)
    weights_known: set[int] = field(default_factory=set)  # layers whose statistics of weights alone are taken
    weighed: set[int] = field(default_factory=set)  # those of which they were taken in the running forward

    def __call__(self, seen: Observation) -> None:
        """Add one layer's observation; layers that are not measured are passed over."""
        if not self._counts(seen):
            return
        seen = _where_sums_can_be_made(seen)
        found = self.plan.rotaries.get(seen.layer, DetectedRotary())
        measured: dict[Need, Statistic] = {}
        for need in self.plan.forward_needs_of(seen.layer):
            if need.kind in OF_WEIGHTS and seen.layer in self.weights_known:
                continue  # once is enough
            thinned = replace(need, stride=max(need.stride, self.stride)) if need.kind == "samples" else need
            measured[need] = on_host(measure(thinned, seen, found.of(need.slot)))
        self.weighed -= {seen.layer} & self.weights_known
        self.weighed |= {seen.layer} - self.weights_known
        self.weights_known.add(seen.layer)
        scale = 1.0 if seen.attention is None else seen.attention.scale
        counted = int((seen.valid & (seen.positions >= self.plan.skip_tokens)).sum())
        self.add(seen.layer, LayerStatistics(found.key, found.value, scale, counted, measured))

    def read_again(self, seen: Observation) -> None:
        """Add the reads of another layer to those of the one that caches, which was observed before it; its tokens are
        counted."""
        if not self._counts(seen):
            return
        seen = _where_sums_can_be_made(seen)
        turns = self.plan.rotaries.get(seen.layer, DetectedRotary())
        measured: dict[Need, Statistic] = {}
        for need in self.plan.forward_needs_of(seen.layer):
            if need.kind not in OF_READS or (need.kind in OF_WEIGHTS and seen.layer not in self.weighed):
                continue
            measured[need] = on_host(measure(need, seen, turns.of(need.slot)))
        self._add_weights(seen.layer, {need: measured.pop(need) for need in list(measured) if need.kind in OF_WEIGHTS})
        self.add(seen.layer, LayerStatistics(turns.key, turns.value, 1.0, 0, measured))

    def _counts(self, seen: Observation) -> bool:
        """Whether a layer is measured and shows anything; ValueError for what is not finite."""
        if seen.layer not in self.plan.layers:
            return False
        _refuse_non_finite(seen)
        return bool(seen.key.any() or seen.value.any())  # a warm-up of zeros says nothing

    def _add_weights(self, layer: int, found: Mapping[Need, Statistic]) -> None:
        """Add to the cost of an error what another reader's weights make of it: a sum over readers, no mean."""
        known = self.sums[layer]
        summed: dict[Need, Statistic] = {}
        for need, more in found.items():
            mine = known.measured[need]
            assert isinstance(mine, Moments) and isinstance(more, Moments), "output_gram is of moments"
            summed[need] = replace(mine, outer=mine.outer + more.outer)
        self.sums[layer] = replace(known, measured={**known.measured, **summed})

    def add(self, layer: int, new: LayerStatistics) -> None:
        """Add what was measured of one layer."""
        known = self.sums.get(layer)
        self.sums[layer] = new if known is None else known + new

    def add_gradients(self, found: Mapping[int, Mapping[Need, Statistic]]) -> None:
        """Add what a backward pass gave; its tokens were counted by the forward."""
        for layer, measured in found.items():
            turns = self.plan.rotaries.get(layer, DetectedRotary())
            self.add(layer, LayerStatistics(turns.key, turns.value, 1.0, 0, measured))

    def emptied(self) -> "Gathering":
        """The same with no sums, which knows what need not be measured again."""
        return Gathering(self.plan, self.stride, weights_known=self.weights_known)

    def refuse_unobserved(self) -> None:
        """ValueError, by number, for layers that showed nothing or too little."""
        plan, sums = self.plan, self.sums
        never = [i for i in plan.layers if i not in sums]
        if never:
            notes = {plan.identity.layers[i].note for i in never} - {""}
            reason = f" ({'; '.join(sorted(notes))})" if notes else ""
            raise ValueError(f"layers {never} were never observed: they put nothing into the cache{reason}")
        few = [i for i in plan.layers if sums[i].n_tokens < plan.min_tokens]
        if few:
            counts = [sums[i].n_tokens for i in few]
            raise ValueError(f"layers {few} were observed for {counts} tokens; at least {plan.min_tokens} are needed")


def _refuse_non_finite(seen: Observation) -> None:
    shown = {"keys": seen.key, "values": seen.value}
    if seen.attention is not None:
        shown["queries"] = seen.attention.query
    for name, tensor in shown.items():
        where = seen.valid[:, None, :, None]
        if not bool(tensor.isfinite().logical_or(~where).all()):
            raise ValueError(
                f"layer {seen.layer}: its {name} hold NaN or infinity, so nothing can be measured; "
                "run the model in bfloat16 or float32"
            )


def _where_sums_can_be_made(seen: Observation) -> Observation:
    """The observation on its device, or in the host's memory if the device has no float64."""
    if with_float64(seen.key) is seen.key:
        return seen
    attention = seen.attention
    if attention is not None:
        named: dict[str, Any] = {f.name: getattr(attention, f.name) for f in fields(attention)}
        attention = replace(attention, **{name: x.cpu() for name, x in named.items() if isinstance(x, Tensor)})
    return replace(
        seen,
        key=seen.key.cpu(),
        value=seen.value.cpu(),
        positions=seen.positions.cpu(),
        valid=seen.valid.cpu(),
        attention=attention,
    )
