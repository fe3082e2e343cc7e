"""What processes of a group do in tests of parallel calibration; in a file of its own, for a spawned one to import."""

import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.hf.tiny import build

from karhunen import recipes
from karhunen.calibration import resume
from karhunen.calibration.calibrate import calibrate
from karhunen.calibration.parallel import Processes
from karhunen.statistics.artifact import save_statistics
from karhunen.statistics.gathered import Statistics
from karhunen.statistics.need import Need

Scenario = Callable[[int, Path], None]
NEEDS = (
    *recipes.make("karhunen").needs(),
    Need("samples", "key", 8, skip_tokens=4),
    Need("queries", "key", 8, weighting="attention", skip_tokens=4),
    Need("output_gram", "value"),
    Need("projection", "value"),
)


class Interrupt(Exception):
    pass


def texts(n_texts: int = 7) -> torch.Tensor:
    return torch.randint(1, 99, (n_texts, 300), generator=torch.Generator().manual_seed(1))


def measured(model: Any = None, tokens: Any = None, **settings: Any) -> Statistics:
    return calibrate(
        build("llama") if model is None else model, texts() if tokens is None else tokens, NEEDS, **settings
    )


def whole(rank: int, folder: Path) -> None:
    save_statistics(measured(), folder / f"statistics-{rank}")


def in_pairs(rank: int, folder: Path) -> None:
    save_statistics(measured(batch=2), folder / f"pairs-{rank}")


def of_shared_layers() -> Statistics:
    """Of a model two of whose layers read what the others have cached; three steps, so that sums have an order."""
    needs = (Need("queries", "key", 8), Need("attended", "value"), Need("output_gram", "value"))
    return calibrate(build("gemma3n"), texts(3)[:, :40], needs, min_tokens=16)


def sharing(rank: int, folder: Path) -> None:
    save_statistics(of_shared_layers(), folder / f"shared-{rank}")


def failing(rank: int, folder: Path) -> None:
    model = build("llama", attention_bias=True)
    if rank == 1:
        model.model.layers[1].self_attn.v_proj.bias.data[0] = float("nan")
        model.generation_config.eos_token_id = None
    _noted(rank, folder, "failing", lambda: measured(model))


def with_other_text(rank: int, folder: Path) -> None:
    _noted(rank, folder, "other", lambda: measured(tokens=texts(7 + rank)))


def by_itself(rank: int, folder: Path) -> None:
    """Not in the group at all: each process measures other text."""
    found = measured(tokens=texts(4)[rank:], processes=Processes.alone())
    (folder / f"alone-{rank}").write_text(str(found.n_tokens))


def interrupted_and_resumed(rank: int, folder: Path) -> None:
    resume.INTERVAL_SECONDS = 0.0

    def stop(done: int, total: int) -> None:
        if done >= 300:
            raise Interrupt("stopped by its user")

    _noted(rank, folder, "interrupted", lambda: measured(resume_dir=folder / "partial", progress=stop))
    told: list[int] = []
    found = measured(resume_dir=folder / "partial", progress=lambda done, _: told.append(done))
    save_statistics(found, folder / f"resumed-{rank}")
    (folder / f"told-{rank}").write_text(json.dumps(told))


def lost(rank: int, folder: Path) -> None:
    """The last scenario of a group: one process is gone without a word."""

    def leave(done: int, total: int) -> None:
        raise SystemExit

    if rank == 1:
        raise SystemExit
    _noted(rank, folder, "lost", measured)


def run_together(size: int, folder: Path, scenarios: tuple[Scenario, ...]) -> None:
    """Run scenarios, one after another, in `size` processes of one gloo group."""
    context = get_context("spawn")
    started = [context.Process(target=_process, args=(rank, size, folder, scenarios)) for rank in range(size)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * size


def _process(rank: int, size: int, folder: Path, scenarios: tuple[Scenario, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    for scenario in scenarios:
        scenario(rank, folder)
    if lost not in scenarios:
        dist.destroy_process_group()


def _noted(rank: int, folder: Path, name: str, work: Callable[[], Any]) -> None:
    """The error of `work`, in a file."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  # any is of interest
        (folder / f"{name}-{rank}").write_text(f"{type(error).__name__}: {error}")
