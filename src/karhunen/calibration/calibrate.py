"""One streaming pass over calibration text: the model runs once, and only what was asked for is gathered.

needs of the recipes ─▶ union ─▶ per sequence: forward ─▶ per layer: measure ─▶ sums ─▶ statistics
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.calibration.gradients import measure_gradients
from karhunen.calibration.measure import measure
from karhunen.calibration.resume import Partial
from karhunen.calibration.tokens import Input, sequences
from karhunen.hf.capture import Observation, capturing
from karhunen.hf.describe import describe
from karhunen.hf.gradients import NEAR_TOKENS, SINK_TOKENS
from karhunen.hf.probe import n_positions
from karhunen.hf.rotary import NOT_A_ROTATION, DetectedRotary, detect_rotary
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.identity import ModelIdentity
from karhunen.statistics.need import OF_WEIGHTS, Need, Statistic
from karhunen.values import fingerprint

Progress = Callable[[int, int], None]

MAX_TOKENS = 16384
MIN_TOKENS = 256
MAX_SAMPLES = 16384
GRADIENT_TOKENS = 6144  # gradients are measured on the first this many tokens: a backward pass costs several forwards
MIN_GRADIENT_TOKENS = 2 * (NEAR_TOKENS + SINK_TOKENS)  # of a sequence: in shorter ones few tokens are read from afar


def calibrate(
    model: nn.Module,
    texts: Input,
    needs: Iterable[Need],
    tokenizer: Any = None,
    *,
    max_tokens: int = MAX_TOKENS,
    min_tokens: int = MIN_TOKENS,
    sequence_tokens: int = 2048,
    layers: Iterable[int] | None = None,
    resume_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Statistics of a model's cache layers on text or token ids.

    `layers` are those to measure, by default all that are neither sliding nor other. Sequences are at most
    `sequence_tokens` long, and no longer than the model has positions. With `resume_dir`, an interrupted call with the
    same arguments goes on where it stopped. `progress` is told (tokens done, tokens in all).

    ValueError for input that is empty or too short (for gradients: no sequence of MIN_GRADIENT_TOKENS), a need the
    model cannot answer (rotary frames without RoPE, queries that attention does not show), NaN or infinity in a layer,
    and layers observed for fewer than `min_tokens` tokens, each named.
    """
    identity, rotaries = describe(model), detect_rotary(model)
    plan = _Plan(
        identity, rotaries, tuple(sorted(set(needs), key=repr)), _measured_layers(identity, layers), min_tokens
    )
    plan.check()
    length = min(sequence_tokens, n_positions(model))
    pieces = sequences(texts, tokenizer, length, max_tokens, plan.skip_tokens + 2)
    n_tokens = sum(len(piece) for piece in pieces)
    if n_tokens - plan.skip_tokens * len(pieces) < min_tokens:
        raise ValueError(
            f"the calibration text is too short: {n_tokens} tokens, of which the first {plan.skip_tokens} of each of "
            f"{len(pieces)} sequences do not count; at least {min_tokens} that count are needed"
        )
    if plan.gradient_needs and not _gradient_pieces(pieces):
        raise ValueError(
            "the calibration texts are too short for the Fisher metric, which is measured where a token is read by "
            f"tokens {NEAR_TOKENS} or more after it: at least one sequence has to have {MIN_GRADIENT_TOKENS} tokens, "
            f"and the longest of {len(pieces)} has {max(map(len, pieces))}; give longer texts, join short ones, or use "
            "a recipe without that metric, such as nova_kv or spectra"
        )
    return _run(model, plan, pieces, resume_dir, progress)


def layers_to_measure(identity: ModelIdentity) -> tuple[int, ...]:
    """Layers whose cache grows with the context; in a model of sliding windows alone, all of these."""
    kinds = [layer.kind for layer in identity.layers]
    wanted = "full" if "full" in kinds else "sliding"
    return tuple(i for i, kind in enumerate(kinds) if kind == wanted)


@final
@dataclass(frozen=True)
class _Plan:
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
    def forward_needs(self) -> list[Need]:
        """Those that a forward shows."""
        return [need for need in self.needs if need.kind != "gradients"]

    @property
    def gradient_needs(self) -> list[Need]:
        """Those that take a backward pass."""
        return [need for need in self.needs if need.kind == "gradients"]

    def check(self) -> None:
        """ValueError if a need asks for a rotary frame that the model does not have."""
        moving = [need for need in self.needs if need.block_tokens is not None]
        if not moving:
            return
        if noted := [i for i in self.layers if i in self.rotaries and self.rotaries[i].note]:
            raise ValueError(f"layers {noted}: {NOT_A_ROTATION}")
        if not any(found.key or found.value for found in self.rotaries.values()):
            raise ValueError(
                f"{self.identity.architecture} has no RoPE, so {moving[0]} cannot be measured; "
                "use a recipe with a post-RoPE frame (block_tokens=None)"
            )

    def fingerprint(self, pieces: list[Int[Tensor, " _"]]) -> str:
        """Names everything the sums depend on."""
        return fingerprint((self.identity, self.needs, self.layers, pieces))


@final
@dataclass
class _Gathering:
    """Sums so far; as a listener, adds what each layer shows."""

    plan: _Plan
    stride: int
    sums: dict[int, LayerStatistics] = field(default_factory=dict)

    def __call__(self, seen: Observation) -> None:
        if seen.layer not in self.plan.layers:
            return
        _refuse_non_finite(seen)
        if not (seen.key.any() or seen.value.any()):
            return  # a warm-up of zeros says nothing
        found = self.plan.rotaries.get(seen.layer, DetectedRotary())
        known = self.sums.get(seen.layer)
        measured: dict[Need, Statistic] = {}
        for need in self.plan.forward_needs:
            if known is not None and need.kind in OF_WEIGHTS and need in known.measured:
                measured[need] = known.measured[need]  # once is enough
                continue
            thinned = replace(need, stride=max(need.stride, self.stride)) if need.kind == "samples" else need
            rotary = found.key if need.slot == "key" else found.value
            measured[need] = measure(thinned, seen, rotary)
        scale = 1.0 if seen.attention is None else seen.attention.scale
        counted = int((seen.valid & (seen.positions >= self.plan.skip_tokens)).sum())
        new = LayerStatistics(found.key, found.value, scale, counted, measured)
        self.sums[seen.layer] = new if known is None else known + new

    def add_gradients(self, found: Mapping[int, Mapping[Need, Statistic]]) -> None:
        """Add what a backward pass gave; its tokens were counted by the forward."""
        for layer, measured in found.items():
            known = self.sums[layer]
            self.sums[layer] = known + LayerStatistics(known.key_rotary, known.value_rotary, 1.0, 0, measured)


def _run(
    model: nn.Module,
    plan: _Plan,
    pieces: list[Int[Tensor, " _"]],
    resume_dir: Path | str | None,
    progress: Progress | None,
) -> Statistics:
    lengths = [len(piece) for piece in pieces]
    gathering = _Gathering(plan, stride=max(1, math.ceil(sum(lengths) / MAX_SAMPLES)))
    partial = None if resume_dir is None else Partial(Path(resume_dir), plan.fingerprint(pieces))
    backward = _gradient_pieces(pieces) if plan.gradient_needs else []
    steps = [*((piece, False) for piece in pieces), *((piece, True) for piece in backward)]
    total = sum(len(piece) for piece, _ in steps)
    done = 0
    if partial is not None and (found := partial.load()) is not None:
        done, saved = found
        gathering.sums = dict(saved.layers)
    source = (_source(pieces),)
    for index in range(done, len(steps)):
        piece, is_backward = steps[index]
        if is_backward:
            gathering.add_gradients(
                measure_gradients(model, piece, plan.gradient_needs, plan.layers, plan.rotaries, seed=index)
            )
        else:
            with capturing(model, gathering) as run:
                run(piece[None], None)
        if progress is not None:
            progress(sum(len(piece) for piece, _ in steps[: index + 1]), total)
        if partial is not None and index + 1 < len(steps):
            partial.save(index + 1, Statistics(plan.identity, dict(gathering.sums), source))
    _refuse_unobserved(plan, gathering.sums)
    if partial is not None:
        partial.clear()
    return Statistics(plan.identity, {i: gathering.sums[i] for i in plan.layers}, source)


def _gradient_pieces(pieces: list[Int[Tensor, " _"]]) -> list[Int[Tensor, " _"]]:
    """Whole sequences of MIN_GRADIENT_TOKENS or more, spread evenly: GRADIENT_TOKENS together, or half of the text if
    it is short; at least one, and none only if there is none of that length."""
    pieces = [piece for piece in pieces if len(piece) >= MIN_GRADIENT_TOKENS]
    if not pieces:
        return []
    n_tokens = min(GRADIENT_TOKENS, sum(len(piece) for piece in pieces) / 2)
    n_wanted = max(1, round(n_tokens / max(len(piece) for piece in pieces)))
    stride = max(1, len(pieces) // n_wanted)
    return pieces[::stride][:n_wanted]


def _measured_layers(identity: ModelIdentity, layers: Iterable[int] | None) -> tuple[int, ...]:
    chosen = layers_to_measure(identity) if layers is None else tuple(sorted(set(layers)))
    for layer in chosen:
        if not 0 <= layer < len(identity.layers):
            raise ValueError(f"there is no layer {layer}; the model has layers 0 to {len(identity.layers) - 1}")
    if not chosen:
        notes = sorted({shape.note for shape in identity.layers})
        raise ValueError(f"{identity.architecture} has no layer to measure: {'; '.join(notes)}")
    return chosen


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


def _refuse_unobserved(plan: _Plan, sums: Mapping[int, LayerStatistics]) -> None:
    never = [i for i in plan.layers if i not in sums]
    if never:
        notes = {plan.identity.layers[i].note for i in never} - {""}
        reason = f" ({'; '.join(sorted(notes))})" if notes else ""
        raise ValueError(f"layers {never} were never observed: they put nothing into the cache{reason}")
    few = [i for i in plan.layers if sums[i].n_tokens < plan.min_tokens]
    if few:
        counts = [sums[i].n_tokens for i in few]
        raise ValueError(f"layers {few} were observed for {counts} tokens; at least {plan.min_tokens} are needed")


def _source(pieces: list[Int[Tensor, " _"]]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(torch.cat([piece, piece.new_tensor([-1])]).numpy().tobytes())
    return f"{sum(len(piece) for piece in pieces)} tokens, sha256 {digest.hexdigest()[:16]}"
