"""`karhunen plan`: what of a model fits where, dense and coded, and whether coding is worth it."""

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from karhunen.byte_sizes import bytes_of, bytes_per_second_of
from karhunen.cli.loading import fetching
from karhunen.cli.options import DEFAULT_DEVICE
from karhunen.cli.plan_tables import show
from karhunen.cli.screen import Screen, rounded
from karhunen.planning import table
from karhunen.planning.capacity import Machine, Work
from karhunen.planning.plan import Plan, make_plan
from karhunen.planning.rate import Rate, nominal
from karhunen.planning.reading import read_shape
from karhunen.planning.shape import BITS, ModelShape

if TYPE_CHECKING:
    from karhunen.calibration.memory_plan import MemoryPlan
    from karhunen.recipe import Recipe

USUAL_CONTEXT = 32768
DEFAULT_RECIPES = ("karhunen",)
FAILED = 3  # exit code of a verdict, which is no error
PICTURES = (".png", ".svg", ".pdf")
CALIBRATION_TOKENS, SEQUENCE_TOKENS = 16384, 2048


@final
@dataclass(frozen=True)
class Wanted:
    """The arguments as they were given."""

    model: str
    memory: str | None = None
    devices: int = 1
    reserve: str = "5%"
    bandwidth: str | None = None
    weights: str | None = None
    cache_dtype: str = "bfloat16"
    context: int | None = None
    batch: int = 1
    recipes: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()
    calibration: bool = False
    check: Path | None = None
    check_tokens: int = 2048
    device: str = DEFAULT_DEVICE
    max_step: float = 1.0
    plot: Path | None = None


def run(wanted: Wanted, as_json: bool) -> int:
    """Print the plan; with `check`, also compare it with the model as it runs: 3 if a line of that failed."""
    machine, asked = machine_of(wanted), work_of(wanted)
    if wanted.plot is not None:
        _check_plot(wanted.plot)
    codec: Any = None
    tolerance: Any = None
    devices: tuple[str, ...] = ()
    if wanted.device != DEFAULT_DEVICE and wanted.check is None:
        raise ValueError(f"--device {wanted.device} says where --check runs the model; give --check, or leave it out")
    if wanted.check is not None:
        from karhunen.calibration.placement import chosen
        from karhunen.codec import Codec
        from karhunen.evaluation.adoption import Tolerance

        devices = chosen(wanted.device)
        tolerance = Tolerance(step=wanted.max_step)
        codec = Codec.from_pretrained(wanted.check)
    with Screen(as_json).open() as screen:
        shape = shape_of(screen, wanted.model)
        if wanted.context is None:
            asked = replace(asked, context=min(USUAL_CONTEXT, shape.positions or USUAL_CONTEXT))
        named = _recipes(wanted)
        plan = make_plan(shape, machine, asked, _rates(named, wanted.ratios, shape))
        show(screen, plan)
        document: dict[str, Any] = plan.document()
        if wanted.calibration:
            document["calibration"] = _calibration(screen, wanted, machine, named)
        if wanted.plot is not None:
            _draw(plan, wanted.plot)
            screen.say(f"{wanted.plot}: memory against context")
            document["plot"] = str(wanted.plot)
        passed = True
        if codec is not None:
            from karhunen.cli.plan_check import checked

            lines, passed = checked(screen, wanted.model, codec, shape, wanted.check_tokens, tolerance, devices)
            document["check"] = {"codec": str(wanted.check), "passed": passed, "lines": lines}
        screen.document(rounded(document))
        return 0 if passed else FAILED


def machine_of(wanted: Wanted) -> Machine:
    """Sizes as they were written; ValueError for what is none."""
    memory = None if wanted.memory is None else bytes_of(wanted.memory)
    reserve = _reserve(wanted.reserve, memory or 0)
    bandwidth = None if wanted.bandwidth is None else bytes_per_second_of(wanted.bandwidth)
    return Machine(memory, wanted.devices, reserve if memory else 0, bandwidth)


def work_of(wanted: Wanted) -> Work:
    """Dtypes by name, weights also by size; ValueError for what is neither."""
    weights: str | int | None = wanted.weights
    if wanted.weights is not None and wanted.weights not in BITS:
        try:
            weights = bytes_of(wanted.weights)
        except ValueError as error:
            known = ", ".join(BITS)
            raise ValueError(
                f"--weights {wanted.weights!r} is neither a dtype ({known}) nor a size such as 16GB"
            ) from error
    return Work(wanted.context or USUAL_CONTEXT, wanted.batch, wanted.cache_dtype, weights)


def shape_of(screen: Screen, name: str) -> ModelShape:
    """A model of the table, a folder or config.json, an embedded name, or a hub's id."""
    if (found := table.find(name)) is not None:
        return found
    given = Path(name).expanduser()
    file = given / "config.json" if given.is_dir() else given
    if given.exists() and find_spec("transformers") is None:
        try:
            settings: Any = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{file} holds no settings; give a model's config.json")
        return read_shape(settings, given.name, str(file), complete=False)
    if not given.exists() and "/" not in name:
        from karhunen.hf.model_sources import MODELS

        if name not in MODELS:
            known = ", ".join(table.names())
            raise ValueError(
                f"{name!r} is neither a model of the table nor a folder nor a hub id; the table has {known}"
            )
    from karhunen.hf.settings import settings_of

    with fetching(screen, f"looking at {given.name}") as on_fetch:
        settings, source = settings_of(name, on_fetch)
    return read_shape(settings, given.name, source)


def _reserve(text: str, memory: int) -> int:
    if not text.endswith("%"):
        return 0 if text == "0" else bytes_of(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"--reserve {text!r} is not a share of the memory; write it as 5%, or as a size such as 1.2GB")
    return int(share * memory)


def _recipes(wanted: Wanted) -> list[tuple[str, "Recipe"]]:
    """Those asked for, bare names at all their own rates; karhunen's if neither a recipe nor a ratio was."""
    texts = wanted.recipes or (() if wanted.ratios else DEFAULT_RECIPES)
    if not texts:
        return []
    from karhunen import recipes
    from karhunen.evaluation.results.rates import settings

    found: list[tuple[str, Recipe]] = []
    for text in texts:
        rates = {} if ":" in text else settings(text.strip())
        for options in rates.values() or ({},):
            said = ",".join(f"{name}={value}" for name, value in options.items())
            full = f"{text.strip()}:{said}" if said else text
            found.append((full, recipes.make(full)))
    return found


def _rates(named: list[tuple[str, "Recipe"]], ratios: tuple[float, ...], shape: ModelShape) -> list[Rate]:
    """Nominal ratios need no torch; recipes do."""
    found: list[Rate] = []
    if named:
        from karhunen.planning.price import prices

        found = prices(named, shape)
    return [*found, *(nominal(ratio, shape) for ratio in ratios)]


def _calibration(
    screen: Screen, wanted: Wanted, machine: Machine, named: list[tuple[str, "Recipe"]]
) -> list[dict[str, str]]:
    """One line of memory for each set of statistics that the recipes ask for; what does not fit is said there too."""
    import torch

    from karhunen.calibration.memory import HOST, Work
    from karhunen.calibration.placement import accelerators, place
    from karhunen.hf.skeleton import skeleton, skeleton_of

    entry = table.entry_of(wanted.model)
    given = Path(wanted.model).expanduser()
    name = str(given.parent) if given.is_file() else wanted.model
    bare = skeleton(name, torch.bfloat16) if entry is None else skeleton_of(entry["config"], torch.bfloat16)
    on_host = machine.memory_bytes is None
    devices = (HOST,) if on_host else accelerators(machine.n_devices)
    said: list[dict[str, str]] = []
    asked = {recipe.needs(): name for name, recipe in reversed(named) if recipe.needs()}
    for needs, recipe in reversed(asked.items()):
        work = Work(tuple(needs), (), CALIBRATION_TOKENS, SEQUENCE_TOKENS)
        try:
            found: MemoryPlan = place(bare, devices, work, dict.fromkeys(devices, machine.memory_bytes), None).plan
            line = found.line()
        except ValueError as error:
            line = str(error)
        screen.say(f"calibrating {recipe.partition(':')[0]}, {CALIBRATION_TOKENS:,} tokens, bfloat16: {line}")
        said.append({"recipe": recipe.partition(":")[0], "said": line})
    return said


def _check_plot(file: Path) -> None:
    if file.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {file} names no kind of picture; use {', '.join(PICTURES)}")
    if not file.parent.is_dir():
        raise ValueError(f"--plot {file}: there is no folder {file.parent}")


def _draw(plan: Plan, file: Path) -> None:
    from karhunen.evaluation.results.plan_plot import plan_figure

    plan_figure(plan).savefig(file, dpi=150)
