"""`karhunen calibrate`: text, or saved statistics, become a codec in a folder; in several processes under torchrun."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from karhunen.cli.loading import fetching, load_model, torch_dtype
from karhunen.cli.screen import Screen, grid, rounded

if TYPE_CHECKING:
    from torch import Tensor

    from karhunen.calibration.memory_plan import MemoryPlan
    from karhunen.calibration.parallel import Channel, Processes
    from karhunen.calibration.placement import Placement
    from karhunen.recipe import Recipe
    from karhunen.statistics.gathered import Statistics


@final
@dataclass(frozen=True)
class Wanted:
    """The arguments as they were given."""

    output: Path | None
    model_name: str
    recipe_text: str
    texts: tuple[Path, ...]
    max_tokens: int
    own_samples: int | None
    resume: Path | None
    saved: Path | None
    keep_statistics: bool
    dtype: str
    device: str
    sequence_tokens: int
    batch: int | None
    memory: str | None
    plan: bool

    @property
    def n_own(self) -> int:
        """Tokens that the model writes. Beside the built-in text, manuals and code, they stand for other text that it
        will meet (docs/calibration.md); whoever gives text knows what that is."""
        if self.own_samples is not None:
            return self.own_samples
        return 0 if self.texts or self.saved is not None else self.max_tokens // 2


def run(wanted: Wanted, as_json: bool) -> None:
    """Write the codec; everything that can be refused is refused before the model runs.

    Of several processes the first prints and writes.
    """
    from karhunen import recipes
    from karhunen.calibration.parallel import Processes

    recipe = recipes.make(wanted.recipe_text)
    with Processes.launched() as processes, _speaking(processes), Screen(as_json).open() as screen:
        with processes.connected() as channel:
            with channel.together():
                _check(wanted)
            if wanted.saved is not None:
                from karhunen.statistics.artifact import load_statistics

                statistics = load_statistics(wanted.saved)
            else:
                placement = _placed(screen, wanted, recipe, channel)
                if wanted.plan:
                    _show_plan(screen, placement.plan)
                    return
                statistics = _measured(screen, wanted, recipe, placement, channel)
        if processes.rank == 0:
            _write(screen, wanted, recipe, statistics)


@contextmanager
def _speaking(processes: "Processes") -> Iterator[None]:
    """All but the first process are silent, errors included: the first says what ended them."""
    if processes.rank == 0:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            yield
        except Exception as error:
            raise SystemExit(2) from error


def _check(wanted: Wanted) -> None:
    from karhunen.codec import FORMAT
    from karhunen.folder import check_target, check_writable
    from karhunen.statistics import artifact

    torch_dtype(wanted.dtype)
    measures = wanted.texts or wanted.resume is not None or wanted.keep_statistics or wanted.plan
    if wanted.saved is not None and (measures or wanted.n_own):
        raise ValueError(
            "--statistics fits what was measured before; leave out --text, --own-samples, --resume, --keep-statistics "
            "and --plan"
        )
    if wanted.plan:
        return
    if wanted.output is None:
        raise ValueError("Missing option '--output' / '-o': where the codec is written")
    check_target(wanted.output, FORMAT)
    if wanted.keep_statistics:
        check_target(wanted.output / "statistics", artifact.FORMAT)
    if wanted.resume is not None:
        check_writable(wanted.resume)


def _placed(screen: Screen, wanted: Wanted, recipe: "Recipe", channel: "Channel") -> "Placement":
    """Where the model goes; refused, before its weights are read, where it does not fit."""
    from karhunen.byte_sizes import bytes_of
    from karhunen.calibration.free_memory import shared_free_bytes
    from karhunen.calibration.memory import HOST, Work
    from karhunen.calibration.placement import check_present, devices_of, place
    from karhunen.hf.skeleton import skeleton

    with channel.together():
        devices = devices_of(wanted.device, channel.local_rank)
        memory = None if wanted.memory is None else bytes_of(wanted.memory)
        if memory is None or not wanted.plan:
            check_present(devices)
    here = (HOST,) if memory is not None else (*devices, HOST)
    free = shared_free_bytes(sorted(set(here)), channel)
    if memory is not None:
        free |= dict.fromkeys(devices, memory)
    with channel.together():
        with fetching(screen, f"looking at {Path(wanted.model_name).name}") as on_fetch:
            bare = skeleton(wanted.model_name, torch_dtype(wanted.dtype), on_fetch)
        n_own = wanted.n_own if recipe.needs() else 0
        work = Work(tuple(recipe.needs()), (), wanted.max_tokens + n_own, wanted.sequence_tokens)
        return place(bare, devices, work, free, wanted.batch)


def _measured(
    screen: Screen, wanted: Wanted, recipe: "Recipe", placement: "Placement", channel: "Channel"
) -> "Statistics":
    from karhunen.byte_sizes import bytes_of
    from karhunen.calibration.calibrate import calibrate
    from karhunen.calibration.texts import calibration_text, read_texts

    with channel.together():
        given: Any = read_texts(wanted.texts) if wanted.texts else calibration_text()
        model, tokenizer = load_model(screen, wanted.model_name, wanted.dtype, placement.device_map)
        _check_suits(recipe, model)
    n_own = wanted.n_own if recipe.needs() else 0
    if n_own:
        given = _with_own(screen, wanted, given, model, tokenizer, channel)
    many = f"; {channel.size} processes" if channel.size > 1 else ""
    with screen.progress("calibrating", "tokens") as advance:
        return calibrate(
            model,
            given,
            recipe.needs(),
            tokenizer,
            max_tokens=wanted.max_tokens + n_own,
            sequence_tokens=wanted.sequence_tokens,
            batch=wanted.batch,
            memory=None if wanted.memory is None else bytes_of(wanted.memory),
            processes=channel.processes,
            resume_dir=wanted.resume,
            on_plan=lambda plan: screen.log(plan.line() + many),
            progress=advance,
        )


def _with_own(
    screen: Screen, wanted: Wanted, given: Any, model: Any, tokenizer: Any, channel: "Channel"
) -> "list[Tensor]":
    """Token ids of the text, and of what the model writes itself, by the first process for all of them."""
    from karhunen.calibration.own_samples import own_samples
    from karhunen.calibration.tokens import sequences
    from karhunen.hf.probe import n_positions

    found: list[Any] = []
    with channel.together():
        if channel.is_first:
            with screen.progress("writing its own text", "tokens") as advance:
                found = own_samples(model, tokenizer, wanted.n_own, folder=wanted.resume, progress=advance)
    with channel.together():
        pieces = sequences(given, tokenizer, min(wanted.sequence_tokens, n_positions(model)), wanted.max_tokens, 2)
    return [*pieces, *channel.from_first(found)]


def _check_suits(recipe: "Recipe", model: Any) -> None:
    """ValueError if the recipe's window cannot serve the model, or none of its layers would be coded."""
    from karhunen.fitting import reasons_left_exact
    from karhunen.hf.describe import identity_of
    from karhunen.hf.suits import check_window

    identity = identity_of(model)
    check_window(model, recipe.window)
    left = reasons_left_exact(recipe, identity)
    if recipe.key is not None and len(left) == len(identity.layers):
        raise ValueError(
            f"{recipe.name} codes no layer of this {identity.architecture}: {'; '.join(sorted(set(left.values())))}"
        )


def _show_plan(screen: Screen, plan: "MemoryPlan") -> None:
    from karhunen.byte_sizes import said_bytes

    table = grid("device", "what", "bytes", "", right=(2,), title="Memory of calibration")
    for device in plan.devices:
        forward, gradients = dict(device.forward), dict(device.gradients)
        rows = [("weights", device.weights), ("statistics", device.statistics)]
        rows += [(f"forward: {name}", n) for name, n in forward.items()]
        rows += [(f"or gradients: {name}", n) for name, n in gradients.items()]
        for name, n_bytes in [(name, n) for name, n in rows if n]:
            table.add_row(device.device, name, f"{n_bytes:,}", said_bytes(n_bytes))
        free = plan.free.get(device.device)
        table.add_row(device.device, "at the peak", f"{device.peak:,}", said_bytes(device.peak))
        table.add_row(device.device, "free", "not known" if free is None else f"{free:,}", said_bytes(free or 0))
        table.add_section()
    screen.table(table)
    screen.say(plan.line())
    devices: list[dict[str, Any]] = [
        {**asdict(d), "peak": d.peak, "free": plan.free.get(d.device)} for d in plan.devices
    ]
    screen.document(
        {
            "devices": devices,
            "batch": plan.work.batch,
            "sequence_tokens": plan.work.sequence_tokens,
            "said": plan.line(),
        }
    )


def _write(screen: Screen, wanted: Wanted, recipe: "Recipe", statistics: "Statistics") -> None:
    from karhunen.fitting import fit
    from karhunen.statistics import artifact

    assert wanted.output is not None, "checked before the model ran"
    output, beside = wanted.output, wanted.output / "statistics"
    screen.log(f"fitting {recipe.name}")
    codec = fit(recipe, statistics)
    for note in codec.origin.notes:
        screen.log(note)
    codec.save_pretrained(output)
    if wanted.keep_statistics:
        artifact.save_statistics(statistics, beside)
    elif beside.exists() and (wanted.saved is None or wanted.saved.resolve() != beside.resolve()):
        screen.log(f"{beside} are of an earlier calibration, and stay; --keep-statistics writes new ones there")
    screen.say(
        f"{output}: {recipe.name} for {codec.model.architecture}, {len(codec.layers)} layers coded, "
        f"{len(codec.left_exact)} exact; {statistics.n_tokens:,} calibration tokens, "
        f"{codec.table_bytes():,} bytes of shared tables"
    )
    screen.document(
        rounded(
            {
                "codec": str(output),
                "recipe": recipe.name,
                "recipe_fingerprint": recipe.fingerprint(),
                "codec_fingerprint": codec.fingerprint(),
                "architecture": codec.model.architecture,
                "coded_layers": sorted(codec.layers),
                "left_exact": {str(i): reason for i, reason in codec.left_exact.items()},
                "calibration": list(statistics.sources),
                "calibration_tokens": statistics.n_tokens,
                "table_bytes": codec.table_bytes(),
                "notes": list(codec.origin.notes),
                "statistics": str(beside) if wanted.keep_statistics else None,
            }
        )
    )
