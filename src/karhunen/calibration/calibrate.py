"""One streaming pass over calibration text: the model runs once, and only what was asked for is gathered.

needs of the recipes ─▶ union ─▶ per step of sequences: forward ─▶ per layer: measure ─▶ sums ─▶ statistics
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from karhunen.calibration.checks import check_counts, check_differentiable, check_ids, check_seen, checked_needs
from karhunen.calibration.free_memory import shared_free_bytes
from karhunen.calibration.gathering import Gathering, Plan
from karhunen.calibration.memory import HOST, MAX_SAMPLES, Work
from karhunen.calibration.memory_plan import MemoryPlan, plan_memory
from karhunen.calibration.parallel import Channel, Processes
from karhunen.calibration.resume import Partial
from karhunen.calibration.steps import Step, gradient_pieces, min_gradient_tokens, steps_of
from karhunen.calibration.tokens import sequences
from karhunen.hf.describe import describe
from karhunen.hf.in_graph import shares_layers
from karhunen.hf.probe import n_positions
from karhunen.hf.rotary import detect_rotary
from karhunen.hf.sizes import ModelSizes, sizes_of
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.identity import ModelIdentity
from karhunen.statistics.need import Need

Progress = Callable[[int, int], None]

MAX_TOKENS = 16384
MIN_TOKENS = 256


def calibrate(
    model: nn.Module,
    texts: Any,
    needs: Iterable[Need],
    tokenizer: Any = None,
    *,
    max_tokens: int = MAX_TOKENS,
    min_tokens: int = MIN_TOKENS,
    sequence_tokens: int = 2048,
    layers: Iterable[int] | None = None,
    batch: int | None = None,
    memory: int | None = None,
    processes: Processes | None = None,
    resume_dir: Path | str | None = None,
    on_plan: Callable[[MemoryPlan], None] | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Statistics of a model's cache layers on text or token ids, as `tokens.sequences` reads them.

    `layers` are those to measure, by default all that are neither sliding nor other. Sequences are at most
    `sequence_tokens` long, and no longer than the model has positions. With `resume_dir`, an interrupted call with the
    same arguments goes on where it stopped. `progress` is told (tokens done, tokens in all): the share of the work
    that is done, as tokens of the text, some of which are read twice.

    `batch` sequences of one length run at a time; by default one on a processor, and on an accelerator as many as fit
    into its memory and keep it busy. `memory` is what the model and its calibration may take of each device, in bytes,
    by default what is free; `on_plan` is told what will be held before anything runs.

    In an initialised process group, or in `processes`, each process runs its share and all return the same statistics,
    those of one process bit for bit. Every process gives the same arguments; `progress`, `on_plan` and `resume_dir`
    serve the first.

    ValueError for input that is empty or too short (for gradients: no sequence that reaches past the recent window) or
    of ids that the model does not know, a need the model cannot answer (rotary frames without RoPE, queries that
    attention does not show, gradients under inference mode), NaN or infinity in a layer,
    layers observed for fewer than `min_tokens` tokens, each named, memory that does not suffice, and processes that
    were given other input or of which one failed; ConnectionError if one is gone.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch} is not a number of sequences; use 1 or more, or None to have it chosen")
    with (processes or Processes.found()).connected() as channel:
        with channel.together():
            check_counts(max_tokens=max_tokens, min_tokens=min_tokens, sequence_tokens=sequence_tokens)
            wanted = checked_needs(needs)
            if any(need.kind == "gradients" for need in wanted):
                check_differentiable(model)
            identity, rotaries = describe(model), detect_rotary(model)
            plan = Plan(identity, rotaries, wanted, _measured_layers(identity, layers, wanted), min_tokens)
            plan.check()
            check_seen(model, wanted, plan.layers)
            length = min(sequence_tokens, n_positions(model))
            pieces = _pieces(plan, sequences(texts, tokenizer, length, max_tokens, plan.skip_tokens + 2))
            check_ids(model, pieces)
            sizes = sizes_of(model)
            work = Work(wanted, plan.layers, sum(map(len, pieces)), max(map(len, pieces)))
        fitting = _fitting(sizes, work, memory, batch, channel)
        if on_plan is not None and channel.is_first:
            on_plan(fitting)
        name = plan.fingerprint(pieces, fitting.work.batch)
        if len(set(channel.all(name))) > 1:
            raise ValueError(
                "the processes were given other models, texts, needs or layers; each has to be given the same, and all "
                "of the text: it is dealt out here"
            )
        steps = steps_of(pieces, fitting.work.batch, min_gradient_tokens(plan.gradient_needs))
        partial = None if resume_dir is None else Partial(Path(resume_dir), name)
        return _run(model, plan, pieces, steps, channel, partial, progress)


def layers_to_measure(identity: ModelIdentity) -> tuple[int, ...]:
    """Layers whose cache grows with the context; in a model of sliding windows alone, all of these."""
    kinds = [layer.kind for layer in identity.layers]
    wanted = "full" if "full" in kinds else "sliding"
    return tuple(i for i, kind in enumerate(kinds) if kind == wanted)


def _run(
    model: nn.Module,
    plan: Plan,
    pieces: list[Int[Tensor, " _"]],
    steps: list[Step],
    channel: Channel,
    partial: Partial | None,
    progress: Progress | None,
) -> Statistics:
    """Round by round: every process runs one step, the first adds them up in their order. Where layers share a cache
    a step's sums are whole before they are added, so that their order is that of any number of processes."""
    gathering = Gathering(plan, stride=max(1, math.ceil(sum(map(len, pieces)) / MAX_SAMPLES)))
    source = (_source(pieces),)
    n_tokens, costs = sum(map(len, pieces)), [step.cost for step in steps]
    done, sharing = 0, shares_layers(model)
    with channel.together():
        if partial is not None and channel.is_first and (found := partial.load()) is not None:
            done, saved = found
            gathering.sums = dict(saved.layers)
            gathering.weights_known = set(saved.layers)
    for start in range(channel.from_first(done), len(steps), channel.size):
        end = min(start + channel.size, len(steps))
        mine = gathering if channel.is_first and not sharing else gathering.emptied()
        with channel.together():
            if start + channel.rank < end:
                steps[start + channel.rank].run(model, mine)
        _add_up(gathering, mine, channel, end - start)
        with channel.together():
            if channel.is_first and progress is not None:
                progress(n_tokens * sum(costs[:end]) // sum(costs), n_tokens)
            if channel.is_first and partial is not None and end < len(steps):
                partial.save(end, Statistics(plan.identity, dict(gathering.sums), source))
    with channel.together():
        if channel.is_first:
            gathering.refuse_unobserved()
            if partial is not None:
                partial.clear()
    shown = {i: channel.from_first(gathering.sums.get(i)) for i in plan.layers}
    return Statistics(plan.identity, {i: layer for i, layer in shown.items() if layer is not None}, source)


def _add_up(gathering: Gathering, mine: Gathering, channel: Channel, n_running: int) -> None:
    """Sums of this round's other processes, one layer of one process at a time; its own first, where kept apart."""
    if channel.is_first and mine is not gathering:
        for layer, new in mine.sums.items():
            gathering.add(layer, new)
    for sender in range(1, n_running):
        for layer in gathering.plan.layers:
            new = channel.sent(mine.sums.get(layer), sender)
            if new is not None:
                gathering.add(layer, new)


def _measured_layers(identity: ModelIdentity, layers: Iterable[int] | None, needs: tuple[Need, ...]) -> tuple[int, ...]:
    if layers is None and needs and all(shape.kind != "full" for shape in identity.layers):
        kinds = {shape.kind for shape in identity.layers}
        if "sliding" in kinds:
            raise ValueError(
                f"every layer of this {identity.architecture} that attends does so in a sliding window, whose size "
                "does not grow: no recipe codes any of them; name them in `layers` to measure them all the same"
            )
    chosen = layers_to_measure(identity) if layers is None else tuple(sorted(set(layers)))
    for layer in chosen:
        if not 0 <= layer < len(identity.layers):
            raise ValueError(f"there is no layer {layer}; the model has layers 0 to {len(identity.layers) - 1}")
    if not chosen:
        notes = sorted({shape.note for shape in identity.layers})
        raise ValueError(f"{identity.architecture} has no layer to measure: {'; '.join(notes)}")
    return chosen


def _pieces(plan: Plan, pieces: list[Int[Tensor, " _"]]) -> list[Int[Tensor, " _"]]:
    """The sequences as they are; ValueError where they are too short or too few."""
    n_tokens = sum(len(piece) for piece in pieces)
    if n_tokens - plan.skip_tokens * len(pieces) < plan.min_tokens:
        raise ValueError(
            f"the calibration text is too short: {n_tokens} tokens, of which the first {plan.skip_tokens} of each of "
            f"{len(pieces)} sequences do not count; at least {plan.min_tokens} that count are needed"
        )
    least, near = min_gradient_tokens(plan.gradient_needs), max((n.near_tokens for n in plan.gradient_needs), default=0)
    if plan.gradient_needs and not gradient_pieces(pieces, least):
        raise ValueError(
            "the calibration texts are too short for the Fisher metric, which is measured where a token is read by "
            f"tokens {near} or more after it: at least one sequence has to have {least} tokens, "
            f"and the longest of {len(pieces)} has {max(map(len, pieces))}; give longer texts, join short ones, or use "
            "a recipe without that metric, such as nova_kv or spectra"
        )
    return pieces


def _fitting(sizes: ModelSizes, work: Work, memory: int | None, batch: int | None, channel: Channel) -> MemoryPlan:
    """The work in batches that fit beside the weights on the devices of every process."""
    free = shared_free_bytes(sorted({*sizes.devices, HOST}), channel)
    if memory is not None:
        free |= {device: max(0, memory - sizes.weight_bytes(device)) for device in sizes.devices}
    with channel.together():
        chosen = plan_memory(sizes, work, free, batch)
    least = min(channel.all(chosen.work.batch))
    return chosen if chosen.work.batch == least else plan_memory(sizes, work, free, least)


def _source(pieces: list[Int[Tensor, " _"]]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(torch.cat([piece, piece.new_tensor([-1])]).numpy().tobytes())
    return f"{sum(len(piece) for piece in pieces)} tokens, sha256 {digest.hexdigest()[:16]}"
